"""What is divided by: the mean removed or not, how squares are averaged, eps and where it enters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.audit.identify.layout import Layout, Run
from normkit.audit.identify.parameters import all_finite, neat_eps
from normkit.audit.identify.probe import NotANorm, OtherStatistic, Probe
from normkit.spec import EpsAt, Statistic

TINY = 2.0**-58
"""An input scale at which only eps is left of the divisor, and squares are still normal numbers in float32."""


FAR = 2.0**24
"""A scale at which not even an eps of one, added to a root, shows in float32."""


class Division(NamedTuple):
    """The statistic of a norm whose gain is one and whose bias is zero."""

    centered: bool
    statistic: Statistic
    partial: float
    eps: float
    eps_at: EpsAt


def division(probe: Probe, run: Run, shape: tuple[int, ...], layout: Layout, leading_only: bool) -> Division:
    """Measure the statistic of ``run``, a norm without gain and bias.

    Every output of one set is ``(x - c) / den``: a straight line through (x, y) gives c and den, and these are
    compared with what each candidate statistic would give.

    Raises:
        NotANorm: outputs of one set are no straight line in the inputs, or no statistic explains it.
    """
    x = probe.spread(shape)
    rows = layout.as_sets(x).double()
    if rows.shape[1] < 2:
        raise NotANorm("each statistic has a single element")
    center, den = _line(rows, layout.as_sets(run(x * FAR)).double())
    centered, statistic, count, s = _best(rows, center, den, leading_only)
    partial = count / rows.shape[1] if leading_only else 1.0
    eps, eps_at = _eps(run, x, layout, s, center if centered else torch.zeros_like(center))
    return Division(centered, statistic, partial, eps, eps_at)


def _line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(c, den) of ``y = (x - c) / den`` for each row."""
    if not all_finite(y):
        raise NotANorm("ordinary inputs give outputs that are not finite")
    dx = x - x.mean(1, keepdim=True)
    dy = y - y.mean(1, keepdim=True)
    slope = (dx * dy).sum(1) / dx.square().sum(1)
    if bool((slope.abs() < 1e-30).any()):
        raise NotANorm("the output does not follow the input")
    rest = float((dy - slope[:, None] * dx).square().mean().sqrt() / y.square().mean().sqrt())
    if rest > 1e-4:
        raise NotANorm("within one set the output is no straight line in the input")
    center = x.mean(1) - y.mean(1) / slope
    return center, 1 / slope


def _best(x: Tensor, center: Tensor, den: Tensor, leading_only: bool) -> tuple[bool, Statistic, int, Tensor]:
    """(centered, statistic, how many leading elements enter, s) that explain the measured center and divisor."""
    n = x.shape[1]
    counts = torch.arange(1, n + 1, dtype=torch.float64) if leading_only else torch.tensor([float(n)]).double()
    sums = x.cumsum(1) if leading_only else x.sum(1, keepdim=True)
    squares = x.square().cumsum(1) if leading_only else x.square().sum(1, keepdim=True)
    best: tuple[float, bool, Statistic, int, Tensor] | None = None
    for centered in (True, False):
        mean = sums / counts if centered else torch.zeros_like(sums)
        total = (squares - counts * mean.square()).clamp_min(1e-300)
        # Of two elements the last two agree: what is centred is then a deviation, what keeps its mean a length.
        deviation, length = (counts - 1).clamp_min(1e-9), torch.ones_like(counts)
        rest = (("unbiased", deviation), ("sum", length)) if centered else (("sum", length), ("unbiased", deviation))
        divisors: dict[Statistic, Tensor] = dict((("mean_square", counts), *rest))
        for statistic, divisor in divisors.items():
            s = total / divisor
            root = s.sqrt()
            wrong = ((root / den[:, None] - 1).abs() + (mean - center[:, None]).abs() / root).mean(0)
            k = int(wrong.argmin())
            if best is None or float(wrong[k]) < best[0]:
                best = (float(wrong[k]), centered, statistic, int(counts[k]), s[:, k])
    assert best is not None
    if best[0] > 1e-3:
        _refuse_magnitudes(x, center, den)
        factor = "" if leading_only else f" (divisor over root mean square: {float((den / s_rms(x)).mean()):.4g})"
        raise NotANorm(f"its divisor is no mean, unbiased mean or sum of squares{factor}")
    return best[1:]


_MAGNITUDES: dict[str, Callable[[Tensor], Tensor]] = {
    "l1 length": lambda x: x.abs().sum(1),
    "mean magnitude": lambda x: x.abs().mean(1),
    "largest magnitude": lambda x: x.abs().amax(1),
}


def _refuse_magnitudes(x: Tensor, center: Tensor, den: Tensor) -> None:
    """Name a divisor that is a statistic of magnitudes rather than of squares."""
    for name, statistic in _MAGNITUDES.items():
        s = statistic(x)
        if float(((s / den - 1).abs() + center.abs() / s).mean()) < 1e-3:
            raise OtherStatistic(f"it divides by the {name} of each set", name)


def s_rms(x: Tensor) -> Tensor:
    """Root mean square of each row."""
    return x.square().mean(1).sqrt()


def _eps(run: Run, x: Tensor, layout: Layout, s: Tensor, center: Tensor) -> tuple[float, EpsAt]:
    """eps from the divisor that is left at a tiny scale; its place from the divisor where both parts are equal."""
    d = layout.as_sets(x).double() - center[:, None]

    def divisor(scale: float) -> Tensor:
        y = layout.as_sets(run(x * scale)).double()
        if not all_finite(y):
            raise NotANorm(f"inputs of scale {scale:.1g} give outputs that are not finite")
        return d.square().sum(1) * scale / (d * y).sum(1)

    root = s.sqrt()
    left = divisor(TINY)
    floor = float(left.median())
    if floor < 2 * TINY * float(root.median()):
        return 0.0, "variance"
    crossing = floor / float(root.median())
    near = divisor(crossing)
    part = root * crossing
    models: dict[EpsAt, Tensor] = {
        "variance": (part.square() + floor**2).sqrt(),
        "std": part + floor,
        "floor": part.clamp_min(floor),
    }
    errors: dict[EpsAt, float] = {at: float((model / near - 1).abs().mean()) for at, model in models.items()}
    eps_at = min(errors, key=lambda at: errors[at])
    if errors[eps_at] > 0.02:
        raise NotANorm("small inputs are divided by something else than the statistic with an eps")
    return neat_eps(floor**2 if eps_at == "variance" else floor), eps_at


def crossing_scale(eps: float, eps_at: EpsAt) -> float:
    """The input scale at which an eps is as large as the statistic."""
    if eps <= 0:
        return 1e-3
    return math.sqrt(eps) if eps_at == "variance" else eps
