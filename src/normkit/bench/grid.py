"""The cases: what is computed, on which shape, layout, dtype and number of threads, and how."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

ROWS = ((1, 4096), (64, 4096), (512, 1024), (4096, 4096))
IMAGES = ((8, 64, 56, 56), (32, 256, 14, 14), (2, 512, 7, 7))
ROW_NORMS = ("layer_norm", "rms_norm", "add_rms_norm", "gated_rms_norm", "qk_rms_norm")
CHANNEL_NORMS = ("group_norm", "instance_norm", "batch_norm_train", "batch_norm", "channel_layer_norm")
NORMS = ROW_NORMS + CHANNEL_NORMS
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("fresh", "preallocated", "train")
HEAD = 128
GROUPS = 32
RMS_EPS, EPS = 1e-6, 1e-5
MOMENTUM = 0.1

_AFFINE = ("x", "weight", "bias")
_BATCH = (*_AFFINE, "mean", "var")
_ARGUMENTS = {
    "rms_norm": ("x", "weight"),
    "qk_rms_norm": ("x", "weight"),
    "add_rms_norm": ("x", "other", "weight"),
    "gated_rms_norm": ("x", "other", "weight"),
    "batch_norm_train": _BATCH,
    "batch_norm": _BATCH,
}


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    norm: str
    shape: tuple[int, ...]
    dtype: str
    mode: str
    """``fresh``: forward into a new tensor; ``preallocated``: into a given one; ``train``: forward and backward."""
    threads: int
    channels_last: bool = False

    @property
    def name(self) -> str:
        return f"{self.problem} {self.dtype} {self.mode} {self.threads}t"

    @property
    def problem(self) -> str:
        """Norm, shape and layout."""
        return f"{self.norm} {'x'.join(map(str, self.shape))}{'/last' if self.channels_last else ''}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The fields of `Inputs` that the norm takes, in the order in which every provider's function takes them."""
        return _ARGUMENTS.get(self.norm, _AFFINE)

    @property
    def leaves(self) -> tuple[str, ...]:
        """The arguments that get gradients."""
        return tuple(name for name in self.arguments if name not in ("mean", "var"))

    @property
    def passes(self) -> int:
        """How often memory of x's size must be read or written at least: what GB/s counts.

        Forward: x and y, with a residual also that and the sum, with a gate also that. Backward: x, dy and dx, with a
        residual also the sum's gradient (the residual's is x's), with a gate also that and its gradient.
        """
        forward = 2 + {"add_rms_norm": 2, "gated_rms_norm": 1}.get(self.norm, 0)
        backward = 3 + {"add_rms_norm": 1, "gated_rms_norm": 2}.get(self.norm, 0)
        return forward + (backward if self.mode == "train" else 0)


@dataclass
class Inputs:
    """The tensors of a case."""

    x: Tensor
    other: Tensor
    """The residual or the gate."""
    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    grad: Tensor
    sum_grad: Tensor
    """The gradient of the residual sum."""
    packed: Tensor
    """What x is a slice of, for those who cannot take a slice; else x."""

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(**{f.name: getattr(self, f.name).detach().to(dtype) for f in fields(self)})

    def of(self, case: Case) -> tuple[Tensor, ...]:
        """The norm's arguments."""
        return tuple(getattr(self, name) for name in case.arguments)

    def grads(self, case: Case) -> tuple[Tensor, ...]:
        """The gradients of the norm's outputs."""
        return (self.grad, self.sum_grad) if case.norm == "add_rms_norm" else (self.grad,)


def make_inputs(case: Case) -> Inputs:
    """Random tensors for a case, the same ones each time."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPES[case.dtype])

    def full() -> Tensor:
        if case.norm == "qk_rms_norm":
            return randn(case.shape[0], case.shape[1] // HEAD, HEAD)
        t = randn(*case.shape)
        return t.contiguous(memory_format=torch.channels_last) if case.channels_last else t

    if case.norm == "qk_rms_norm":  # q of a fused projection, [tokens, heads, head]: a slice, not a copy
        tokens, width = case.shape
        packed = randn(tokens, 3 * width)
        x = packed[:, :width].unflatten(-1, (-1, HEAD))
    else:
        x = packed = full()
    features = x.shape[-1] if case.norm in ROW_NORMS else x.shape[1]
    unused = x.new_empty(0)
    other = full() if "other" in case.arguments else unused
    grad = full() if case.mode == "train" else unused
    sum_grad = full() if case.mode == "train" and case.norm == "add_rms_norm" else unused
    # Gains and shifts as trained ones are: spread about one and zero.
    weight, bias = 1 + 0.5 * randn(features), randn(features)
    return Inputs(x, other, weight, bias, randn(features), randn(features).abs() + 0.5, grad, sum_grad, packed)


def groups_of(channels: int) -> int:
    """The groups of a group norm: 32, or one where 32 does not divide the channels."""
    return GROUPS if channels % GROUPS == 0 else 1


def cases(
    norms: tuple[str, ...] = NORMS,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    modes: tuple[str, ...] = MODES,
    threads: tuple[int, ...] = (1, 2),
    shapes: tuple[tuple[int, ...], ...] | None = None,
) -> Iterator[Case]:
    """The grid, or the part of it that the arguments select; given shapes need not be the grid's."""
    for n, norm in itertools.product(threads, norms):
        own = ROWS if norm in ROW_NORMS else IMAGES
        if shapes is not None:
            own = tuple(s for s in shapes if len(s) == len(own[0]) and (norm != "qk_rms_norm" or s[1] % HEAD == 0))
        layouts = (False,) if norm in ROW_NORMS else (False, True)
        for shape, last, dtype, mode in itertools.product(own, layouts, dtypes, modes):
            yield Case(norm, shape, dtype, mode, n, last)
