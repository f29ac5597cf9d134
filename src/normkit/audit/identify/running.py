"""Norms that use stored statistics: elementwise affine in eval mode, with a scale that one buffer sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from normkit.audit.identify.layout import Layout, Run, Sharing, choose, layouts, moved_box
from normkit.audit.identify.parameters import Use, all_finite, neat, neat_eps, use_of
from normkit.audit.identify.probe import LARGE, NotANorm, Probe, Slot
from normkit.audit.identify.statistic import division
from normkit.spec import EpsAt, Running, Statistic


@dataclass(frozen=True)
class Stored:
    """What a norm with running or frozen statistics computes."""

    layout: Layout
    uses: list[Use]
    eps: float
    eps_at: EpsAt
    running: Running | None
    frozen: bool
    centered: bool = True
    statistic: Statistic = "mean_square"
    note: str = ""


class _Batch(NamedTuple):
    """What a training-mode call on the copy showed."""

    layout: Layout
    centered: bool
    statistic: Statistic
    running: Running


def affine_parts(probe: Probe, run: Run, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(scale, shift) of an elementwise affine module.

    Raises:
        NotANorm: it is not affine.
    """
    zero = run(torch.zeros(shape))
    one = run(torch.ones(shape))
    x = probe.random(shape) * 3
    scale, y = one - zero, run(x)
    if not all_finite(scale, zero, y):
        raise NotANorm("ordinary inputs give outputs that are not finite")
    if float((y - x * scale - zero).abs().max()) > 1e-4 * (1e-6 + float((x * scale).abs().max() + zero.abs().max())):
        raise NotANorm("each output depends on its own input alone, and not in a straight line")
    return scale, zero


def stored_statistics(probe: Probe, run: Run, shape: tuple[int, ...]) -> Stored:
    """Measure an elementwise affine module as a norm by stored statistics.

    Raises:
        NotANorm: nothing that it holds acts as a variance.
    """
    baseline = affine_parts(probe, run, shape)
    x = torch.ones(shape)
    uses = [use_of(probe, s, x, lambda: affine_parts(probe, run, shape), baseline) for s in probe.slots]
    variance = [u for u in uses if u.role == "variance" and u.slot.tensor.numel() > 1]
    if len(variance) != 1:
        raise NotANorm("each output is a straight line in its own input: no statistic divides it")
    if any(u.role == "unknown" for u in uses):
        raise NotANorm("a stored tensor acts in a way that no normalization has")
    var = variance[0]
    if len(var.dims) != 1:
        raise NotANorm("the stored statistic does not run along one dim")
    for use in uses:
        if use.role in ("mean", "bias"):
            use.slot.base.zero_()
        elif use.role == "gain":
            use.slot.base.fill_(1 - use.offset)
    kept = {u.slot.name: u for u in uses}
    try:
        probe.reset()
        eps, eps_at = _eps(probe, run, shape, var.slot)
        probe.reset()
        channel = 1 if var.dims[0] == 1 else -1
        mean = next((u.slot for u in uses if u.role == "mean"), None)
        batch, note = _training(probe, run, shape, channel, mean, var.slot)
    finally:
        for use in kept.values():
            use.slot.base = probe.uniform(use.slot.tensor.shape) if use.role != "none" else use.slot.base
        probe.reset()
    if batch is None:
        frozen_layout = Layout("batch", channel)
        frozen = not note
        return Stored(frozen_layout, uses, eps, eps_at, None if frozen else 0.1, frozen, note=note)
    return Stored(
        batch.layout, uses, eps, eps_at, batch.running, False, batch.centered, batch.statistic, note
    )  # fmt: skip


def _eps(probe: Probe, run: Run, shape: tuple[int, ...], variance: Slot) -> tuple[float, EpsAt]:
    def divisor(value: float) -> float:
        variance.set(value)
        zero, one = run(torch.zeros(shape)), run(torch.ones(shape))
        return float(1 / (one - zero).abs().double().mean())

    if abs(divisor(4.0) / divisor(1.0) - 2) > 0.2:
        raise NotANorm("the stored statistic does not divide by its root")
    tiny = 2.0**-100
    left = divisor(tiny)
    if left < 2 * tiny**0.5:
        return 0.0, "variance"
    near = divisor(left**2) / left
    options: dict[EpsAt, float] = {"variance": 2**0.5, "std": 2.0, "floor": 1.0}
    eps_at = min(options, key=lambda at: abs(options[at] - near))
    return neat_eps(left**2 if eps_at == "variance" else left), eps_at


def _training(
    probe: Probe, run: Run, shape: tuple[int, ...], channel: Literal[1, -1], mean: Slot | None, variance: Slot
) -> tuple[_Batch | None, str]:
    """How the module behaves in training mode; None where it goes on using what is stored."""
    x = probe.spread(shape) * LARGE

    def fresh(t: Tensor) -> Tensor:  # a training call moves the stored statistics
        probe.reset()
        return run(t)

    try:
        expected = run(x)
        with probe.training():
            y = fresh(x)
            if torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().mean())):
                still = all(torch.equal(s.tensor, s.base) for s in probe.slots)
                if not still:
                    raise NotANorm("in training it updates its statistics without using the batch's")
                return None, ""
            seen = Sharing(moved_box(fresh, x, (0,) * x.dim()), moved_box(fresh, x, tuple(n - 1 for n in shape)), False)
            if seen.first is None:
                raise NotANorm("in training mode no clear set of elements shares a statistic")
            options = [o for o in layouts(shape, seen) if o.axes in ("batch", "instance")]
            options = [o for o in options if _channel(o, shape) == channel % len(shape)]
            layout = choose(probe, fresh, shape, options)[0]
            found = division(probe, fresh, shape, layout, False)
            running = _momentum(probe, x, run, mean, variance)
    except NotANorm as error:
        probe.reset()
        return None, f"in training mode {error}; batch statistics with momentum 0.1 are assumed"
    return _Batch(layout, found.centered, found.statistic, running), ""


def _channel(layout: Layout, shape: tuple[int, ...]) -> int:
    return layout.channel_dim % len(shape) if isinstance(layout.channel_dim, int) else -1


def _momentum(probe: Probe, x: Tensor, run: Run, mean: Slot | None, variance: Slot) -> Running:
    """The share of the new statistic in each of two successive calls: equal, or 1/n and 1/(n+1) (cumulative)."""
    probe.reset()
    tracked = variance if mean is None else mean
    _zero_counters(probe)
    tracked.set(0.0)
    run(x)
    first = tracked.tensor.double().clone()
    run(x)
    second = tracked.tensor.double().clone()
    # with the same batch twice and target t: first = m1 t, second = first + m2 (t - first)
    _zero_counters(probe)
    tracked.set(1e9)
    run(x)
    shrunk = tracked.tensor.double() / 1e9
    m1 = 1 - float(shrunk.mean())
    if m1 > 1 - 1e-6:
        target = first
    elif m1 < 1e-9:
        return 0.0
    else:
        target = first / m1
    if m1 > 1 - 1e-4:
        tracked.set(0.0)
        _zero_counters(probe)
        run(x)
        run(-x if mean is not None else 2 * x)  # another target: its share tells momentum 1 from a running average
        moved = (tracked.tensor.double() - target).abs().mean() / target.abs().mean()
        full = 2.0 if mean is not None else 3.0
        return 1.0 if abs(float(moved) - full) < 0.1 * full else "cumulative"
    m2 = float(((second - first) / (target - first)).median())
    if abs(m1 - m2) > 0.05 * m1:
        raise NotANorm("its running statistics move by changing shares")
    return min(1.0, neat(m1, 2e-6))


def _zero_counters(probe: Probe) -> None:
    for part in probe.module.modules():
        for counter in part.buffers(recurse=False):
            if not counter.is_floating_point():
                counter.zero_()
