"""The cases: what is computed, on which shape, layout, dtype and number of threads, and how."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = ((1, 4096), (64, 4096), (512, 1024), (4096, 4096))
IMAGES = ((8, 64, 56, 56), (32, 256, 14, 14), (2, 512, 7, 7))
ROW_NORMS = ("layer_norm", "rms_norm", "add_rms_norm", "gated_rms_norm", "qk_rms_norm")
CHANNEL_NORMS = ("group_norm", "instance_norm", "batch_norm_train", "batch_norm", "channel_layer_norm")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("fresh", "preallocated", "train")
HEAD = 128


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
        layout = "/last" if self.channels_last else ""
        shape = "x".join(map(str, self.shape))
        return f"{self.norm} {shape}{layout} {self.dtype} {self.mode} {self.threads}t"

    @property
    def passes(self) -> int:
        """How often memory of x's size is read or written, at least: what GB/s counts."""
        extra = {"add_rms_norm": 2, "gated_rms_norm": 1}.get(self.norm, 0)
        return 2 + extra + (3 + extra if self.mode == "train" else 0)


@dataclass
class Inputs:
    """The tensors of a case."""

    x: Tensor
    other: Tensor  # residual or gate
    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(t.detach().to(dtype) for t in vars(self).values()))


def make_inputs(case: Case) -> Inputs:
    """Random tensors for a case, the same ones each time."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPES[case.dtype])

    def full() -> Tensor:
        if case.norm == "qk_rms_norm":  # q of a fused projection, [tokens, heads, head]: a slice, not a copy
            tokens, width = case.shape
            return randn(tokens, 3 * width)[:, :width].unflatten(-1, (-1, HEAD))
        t = randn(*case.shape)
        return t.contiguous(memory_format=torch.channels_last) if case.channels_last else t

    x = full()
    features = x.shape[-1] if case.norm in ROW_NORMS else x.shape[1]
    grad = full()
    if case.norm == "qk_rms_norm":
        grad = grad.contiguous()
    mean, var = randn(features), randn(features).abs() + 0.5
    return Inputs(x, full(), randn(features), randn(features), mean, var, grad)


def cases(
    norms: tuple[str, ...] = ROW_NORMS + CHANNEL_NORMS,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    modes: tuple[str, ...] = MODES,
    threads: tuple[int, ...] = (1, 2),
    shapes: tuple[tuple[int, ...], ...] | None = None,
) -> Iterator[Case]:
    """The grid, or the part of it that the arguments select."""
    for n, norm in itertools.product(threads, norms):
        own = ROWS if norm in ROW_NORMS else IMAGES
        layouts = (False,) if norm in ROW_NORMS else (False, True)
        for shape, dtype, mode, last in itertools.product(own, dtypes, modes, layouts):
            if shapes is None or shape in shapes:
                yield Case(norm, shape, dtype, mode, n, last)
