"""The effective gain of a norm, and which of its channels stand out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.audit.numbers.record import DEAD, OUTLIER, GainNumbers
from normkit.audit.result import NormRecord


def tensor_of(norm: NormRecord, role: str, model: nn.Module) -> Tensor | None:
    """The tensor that has a part (``weight``, ``bias``, ...) in a norm; None where it has none, or lies on meta."""
    path = norm.parameters.get(role)
    value: object = model if norm.module is None else norm.module
    for part in path.split(".") if path else ():
        value = getattr(value, part, None)
    if not path or not isinstance(value, Tensor) or value.is_meta:
        return None
    return value.detach()


def effective_gain(norm: NormRecord, model: nn.Module) -> Tensor | None:
    """``weight_offset + weight`` in float64, in the weight's shape."""
    weight = tensor_of(norm, "weight", model)
    return None if weight is None or norm.spec is None else weight.double() + norm.spec.weight_offset


def gain_numbers(gain: Tensor | None) -> GainNumbers | None:
    """The magnitudes of a gain."""
    if gain is None or gain.numel() == 0:
        return None
    size = gain.abs().flatten()
    median = size.median()
    dead = (size <= DEAD * median).nonzero().flatten() if median > 0 else (size == 0).nonzero().flatten()
    large = (size >= OUTLIER * median).nonzero().flatten() if median > 0 else torch.empty(0)
    return GainNumbers(
        channels=size.numel(),
        min=size.min().item(),
        median=median.item(),
        max=size.max().item(),
        dead=tuple(int(i) for i in dead),
        outliers=tuple(int(i) for i in large),
    )
