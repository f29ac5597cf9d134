"""Norm: any NormSpec as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit import functional as F
from normkit.checks import check_dtype
from normkit.functional import as_shape
from normkit.nn._shared import empty, fill, load_uncounted
from normkit.nn.running import normalize_batch, normalize_running
from normkit.spec import NormSpec


class Norm(nn.Module):
    """Any NormSpec as a module; `build` is its constructor by another name.

    ``y = (x - c) / sqrt(s + eps) * (weight_offset + weight) + bias``, with the mean c and the spread s of the spec.

    Args:
        spec: what to compute.
        features: the number of features or channels, or the trailing feature dims.
        heads: for ``weight_shape="per_head"``, the dim(s) of the gain before the features.
        device: where parameters and buffers live.
        dtype: the parameters' dtype.

    Shape:
        as the spec's ``channel_dim`` says, kept.

    Raises:
        ValueError, TypeError: features that do not fit the spec, or an argument of another type.

    Differs from `torch.nn`, which has a module for each kind: parameters and buffers have torch's names, so that a
    BatchNorm's state_dict loads into ``build(TORCH_BATCH, C)``.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        spec: NormSpec,
        features: int | Sequence[int],
        *,
        heads: int | Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, NormSpec):
            raise TypeError(f"spec must be a NormSpec, such as normkit.spec.GEMMA; got {type(spec).__name__} {spec!r}")
        check_dtype(dtype)
        shape = as_shape(features, "features")
        wanted = len(spec.channel_dim) if isinstance(spec.channel_dim, tuple) else 1
        if len(shape) != wanted:
            raise ValueError(f"features {shape} must have {wanted} dims for channel_dim={spec.channel_dim}")
        if spec.groups > 1 and shape[0] % spec.groups:
            raise ValueError(f"groups={spec.groups} does not divide features {shape[0]}")
        if (spec.weight_shape == "per_head") != (heads is not None):
            raise ValueError(f"heads goes with weight_shape='per_head'; got heads={heads} and {spec.weight_shape!r}")
        self.spec = spec
        self.features = shape
        weight_shape = {
            "features": shape,
            "scalar": (1,),
            "per_head": (*(() if heads is None else as_shape(heads, "heads")), *shape),
        }[spec.weight_shape]

        self.register_parameter("weight", empty(weight_shape, device, dtype) if spec.has_weight else None)
        self.register_parameter("bias", empty(shape, device, dtype) if spec.has_bias else None)
        tracked = spec.frozen or spec.running is not None
        self.register_buffer("running_mean", torch.zeros(shape, device=device, dtype=dtype) if tracked else None)
        self.register_buffer("running_var", torch.ones(shape, device=device, dtype=dtype) if tracked else None)
        counted = spec.running is not None
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=device) if counted else None)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Running mean 0 and variance 1, no batch seen."""
        fill(self.running_mean, 0.0)
        fill(self.running_var, 1.0)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Gain 1 (a stored weight of 1 - weight_offset), bias 0, and no batch seen."""
        self.reset_running_stats()
        fill(self.weight, 1.0 - self.spec.weight_offset)
        fill(self.bias, 0.0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        load_uncounted(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self, x: Tensor, gate: Tensor | None = None, *, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize; with ``residual``, normalize the sum and return ``(y, stream)``."""
        if self.running_mean is None:
            return F.norm(x, self.spec, self.weight, self.bias, residual=residual, gate=gate, mask=mask)  # type: ignore[arg-type]
        if residual is not None:
            raise ValueError("residual= is not defined for a norm with running statistics; add before calling")
        if self.training and not self.spec.frozen:
            momentum = None if self.spec.running == "cumulative" else self.spec.running
            return normalize_batch(self, x, self.spec, gate=gate, mask=mask, momentum=momentum)  # type: ignore[arg-type]
        return normalize_running(self, x, self.spec, gate=gate, mask=mask)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{self.features}, {self.spec}"


def build(
    spec: NormSpec,
    features: int | Sequence[int],
    *,
    heads: int | Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Norm:
    """A module that computes ``spec``; see `Norm` for the arguments."""
    return Norm(spec, features, heads=heads, device=device, dtype=dtype)
