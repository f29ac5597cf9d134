"""Norm-like or not: the stated rule for what no NormSpec says.

``other`` is reported for a module that

- gives the same output for an input of twice the size (and is not constant), or scales with it exactly without being
  linear, **and** lets the elements of a set act on each other through one or two numbers only: a norm with an
  activation or a condition, a norm by another statistic (l1, largest), GlobalResponseNorm; or
- acts on each element alone, stays bounded however large the input, and multiplies by a learned gain with one value
  for each feature: DynamicTanh and its kind, which stand where a norm would.

Everything else (linear layers, activations, attention, softmax, blocks) is ``none``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.audit.identify.layout import Run, Sharing, sharing
from normkit.audit.identify.parameters import all_finite, odd_and_even, use_of
from normkit.audit.identify.probe import NotANorm, Probe

_TELLING = 5
"""How long a dim must be for responses along it to show their rank; one of two (a small grid) is made so long."""


def norm_like(probe: Probe, run: Run, shape: tuple[int, ...]) -> str | None:
    """Why the module is norm-like, in words that end a sentence; None where it is not."""
    probe.reset()
    longer = (*shape[:1], *(_TELLING if size == 2 else size for size in shape[1:]))
    shape = longer if longer != shape and probe.accepts(longer) else shape
    try:
        seen = sharing(run, probe.spread(shape) * 4)
        if seen.elementwise:
            return _bounded_with_gain(probe, run, shape)
        x = probe.random(shape)
        zero, small, double = run(torch.zeros(shape)), run(x), run(2 * x)
        y, twice = run(64 * x), run(128 * x)
        if not all_finite(y, twice):
            return None
        other = run(64 * probe.random(shape))
        size = float((other - y).abs().mean())  # what another input changes: a bias has no part in it
        if size < 1e-3 * float(y.abs().mean()) + 1e-30:
            return None
        # also at an ordinary scale: a saturated softmax stays the same only at a large one
        steady = float((twice - y).abs().mean()) < 2e-3 * size and float((double - small).abs().mean()) < 0.02 * size
        if not all_finite(zero):
            zero = torch.zeros(shape)
        rescales = float((twice - zero - 2 * (y - zero)).abs().mean()) < 2e-3 * size
        rescales = rescales and float((y - zero - 64 * (small - zero)).abs().mean()) < 2e-3 * size
        rescales = rescales and not _additive(probe, run, shape, zero)
        if not (steady or rescales) or not _few_numbers(run, 4 * probe.spread(shape), seen):
            return None
    except NotANorm:
        return None
    if steady:
        return (
            "its output does not change with the input's scale, as if divided by a statistic, but no NormSpec says it"
        )
    return "it multiplies each element by a ratio of statistics, so the input's scale passes through"


def _additive(probe: Probe, run: Run, shape: tuple[int, ...], zero: Tensor) -> bool:
    a, b = probe.random(shape), probe.random(shape)
    together = run(a + b)
    apart = run(a) + run(b) - zero
    return float((together - apart).abs().mean()) < 1e-3 * float(together.abs().mean() + 1e-30)


def _few_numbers(run: Run, x: Tensor, seen: Sharing) -> bool:
    """Whether elements act on others through at most two numbers: along some dim the responses have rank two.

    A few elements that act on few others (a local maximum) have that rank too: they must act on a whole dim.
    """
    far = seen.first is not None and any(2 < n == length for (_, length), n in zip(seen.first, x.shape, strict=True))
    largest = [int(i) for i in torch.unravel_index(x.abs().argmax(), x.shape)]
    for d, size in enumerate(x.shape):
        places = list(range(0, size, max(1, size // 5)))[:5]
        places = sorted({*places, largest[d]})  # the largest with the rest, so that a norm by it shows
        rows = []
        for i in places:
            step = torch.zeros_like(x)
            step[(*largest[:d], i, *largest[d + 1 :])] = 0.02 * float(x.abs().mean())
            rows.append(run(x + step) - run(x - step))
        responses = torch.stack(rows)
        responses[(slice(None), *largest[:d], places, *largest[d + 1 :])] = 0  # on others only
        responses = responses.flatten(1).double()
        strength = torch.linalg.svdvals(responses)
        shows = float(strength[0]) > 1e-4 * float(rows[0].abs().max())
        acting = int((responses.norm(dim=1) > 1e-3 * strength[0]).sum())
        if len(strength) > 2 and shows and float(strength[2]) < 0.05 * float(strength[0]) and (far or acting > 2):
            return True
    return False


def _bounded_with_gain(probe: Probe, run: Run, shape: tuple[int, ...]) -> str | None:
    x = probe.random(shape)
    y, far, farther = run(x), run(2.0**20 * x), run(2.0**24 * x)
    if not all_finite(y, farther) or float((far - farther).abs().max()) > 1e-3 * float(y.abs().max()):
        return None
    if float((run(-x) - y).abs().mean()) < 1e-3 * float(y.abs().mean()):
        return None
    baseline = odd_and_even(run, x)
    uses = [use_of(probe, s, x, lambda: odd_and_even(run, x), baseline) for s in probe.slots]
    if any(u.role == "gain" and u.slot.tensor.numel() > 1 for u in uses):
        return "each output is a bounded function of its own input times a learned gain: it divides by no statistic"
    return None
