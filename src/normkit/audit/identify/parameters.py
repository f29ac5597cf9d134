"""What each stored tensor does: gain, bias, running mean, running variance, or something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normkit.audit.identify.layout import box_of, changed
from normkit.audit.identify.probe import Probe, Slot

Role = Literal["none", "gain", "bias", "mean", "variance", "unknown"]
Parts = Callable[[], tuple[Tensor, Tensor]]
"""() -> (what follows the input's sign, what does not), each of the input's shape."""

_QUIET = 1e-4


@dataclass(frozen=True)
class Use:
    """How one slot enters the result."""

    slot: Slot
    role: Role
    dims: tuple[int, ...] = ()
    """The dims of the input that the slot's elements run along."""
    offset: float = 0.0
    """For a gain: what is added to the stored value."""
    unit: Tensor | None = None
    """For a gain: the result per unit of gain."""
    sizes: tuple[int, ...] = ()
    """The input's sizes along those dims, into which the slot's elements fall (one flat tensor may cover several)."""

    def aligned(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A value of the slot, shaped to broadcast against an input of this shape."""
        return align(value, self.dims, shape)


def align(value: Tensor, dims: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Lay a tensor's elements along some dims of a shape."""
    return value.reshape([n if d in dims else 1 for d, n in enumerate(shape)])


def use_of(probe: Probe, slot: Slot, x: Tensor, parts: Parts, baseline: tuple[Tensor, Tensor]) -> Use:
    """Change one slot and compare the odd and the even part of the output with the baseline.

    Args:
        probe: the module under test.
        slot: what to change; it is put back.
        x: an input whose outputs are all different from zero.
        parts: measures (odd, even) at the current slot values.
        baseline: the same at the base values.
    """
    odd, even = baseline
    shape = tuple(x.shape)
    delta = probe.uniform(tuple(slot.tensor.shape), 0.25, 0.75)
    try:
        slot.set(slot.base + delta)
        odd1, even1 = parts()
        slot.set(slot.base + 2 * delta)
        odd2, even2 = parts()
        slot.reset()
        moves_odd = _large(odd1 - odd, odd)
        moves_even = _large(even1 - even, even + odd)
        if not moves_odd and not moves_even:
            return Use(slot, "none")
        dims = _place(probe, slot, x)
    finally:
        slot.reset()
    if dims is None:
        return Use(slot, "unknown")
    sizes = tuple(shape[d] for d in dims)
    step = align(delta, dims, shape)
    straight = not _large(odd2 - odd1 - (odd1 - odd), odd) and not _large(even2 - even1 - (even1 - even), even + odd)
    if not moves_odd:
        if not _large(even1 - even - step, step):
            return Use(slot, "bias", dims, sizes=sizes)
        return Use(slot, "mean" if straight else "unknown", dims, sizes=sizes)
    if not straight:
        return Use(slot, "variance", dims, sizes=sizes)
    unit = (odd1 - odd) / step
    offset = odd / unit - align(slot.base, dims, shape)
    offset = offset[unit.abs() > 0.05 * unit.abs().mean()]
    middle = float(offset.median()) if offset.numel() else math.nan
    spread = float((offset - middle).abs().mean()) if offset.numel() else math.nan
    if not spread < 1e-3:
        return Use(slot, "unknown", dims)
    return Use(slot, "gain", dims, neat(middle, 1e-4), unit, sizes)


def _large(difference: Tensor, scale: Tensor) -> bool:
    return not typical(difference) <= _QUIET * typical(scale) + 1e-12


def typical(values: Tensor) -> float:
    """The median size, of a sample: one row whose statistic happens to be near zero must not decide."""
    flat = values.abs().flatten()
    return float(flat[:: max(1, flat.numel() // 1000)].median())


def _place(probe: Probe, slot: Slot, x: Tensor) -> tuple[int, ...] | None:
    """The dims that the slot's elements run along: where its first element shows."""
    value = slot.base.clone().flatten()
    value[0] += 1.0
    inputs = (x, probe.spread(tuple(x.shape)) * float(x.abs().mean()))  # in two: one output may be near zero in one
    before = [probe(t) for t in inputs]
    slot.set(value)
    box = box_of(changed(before[0], probe(inputs[0])) | changed(before[1], probe(inputs[1])))
    slot.reset()
    if box is None or any(start > 0 or 1 < length < n for (start, length), n in zip(box, x.shape, strict=True)):
        return None
    dims = tuple(d for d, (_, length) in enumerate(box) if length < x.shape[d])
    if not dims and slot.tensor.numel() == 1:
        return dims
    return dims if math.prod(x.shape[d] for d in dims) == slot.tensor.numel() else None


def neat(value: float, tolerance: float) -> float:
    """The shortest decimal within an absolute tolerance of a measured value."""
    for digits in range(7):
        short = round(value, digits)
        if abs(short - value) <= tolerance:
            return short + 0.0
    return value


def neat_eps(value: float) -> float:
    """The shortest decimal (or power of two, as finfo gives) within 1e-4 of a measured eps."""
    if value <= 0 or not math.isfinite(value):
        return 0.0
    power = 2.0 ** round(math.log2(value))
    for short in (*(float(f"{value:.{digits}e}") for digits in range(3)), power):
        if abs(short - value) <= 1e-4 * value:
            return short
    return float(f"{value:.4e}")


def odd_and_even(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The part of the output that changes sign with the input, and the part that does not."""
    plus, minus = run(x), run(-x)
    return (plus - minus) / 2, (plus + minus) / 2


def all_finite(*tensors: Tensor) -> bool:
    """Whether no NaN or infinity came out."""
    return all(bool(torch.isfinite(t).all()) for t in tensors)
