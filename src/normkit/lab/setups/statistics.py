"""Means, slopes and their intervals over seeds, and rows by their cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from normkit.lab.claim import Row

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width: the number after ±."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; ValueError for no values."""
    found = list(values)
    if not found:
        raise ValueError("values must not be empty")
    return math.fsum(found) / len(found)


def t_interval(values: Iterable[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean with Student's t interval; from a single value, an interval without ends.

    A value that is not finite (a run that diverged) makes the mean and both ends what arithmetic makes of it.
    """
    found = list(values)
    if not all(map(math.isfinite, found)):
        total = sum(found) / len(found)
        return Interval(total, -math.inf, math.inf)
    centre = mean(found)
    if len(found) < 2:
        return Interval(centre, -math.inf, math.inf)
    variance = math.fsum((v - centre) ** 2 for v in found) / (len(found) - 1)
    half = t_quantile(confidence, len(found) - 1) * math.sqrt(variance / len(found))
    return Interval(centre, centre - half, centre + half)


def difference(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean of ``a - b``, paired by seed, with its t interval; ValueError for unequal lengths."""
    if len(a) != len(b):
        raise ValueError(f"a and b must be paired; they have {len(a)} and {len(b)} values")
    return t_interval([x - y for x, y in zip(a, b, strict=True)], confidence)


def slope(x: Sequence[float], y: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The least-squares slope of y on x with its t interval; with two points, an interval without ends."""
    if len(x) != len(y) or len(x) < 2:
        raise ValueError(f"x and y must have the same length >= 2; they have {len(x)} and {len(y)}")
    mx, my = mean(x), mean(y)
    spread = math.fsum((a - mx) ** 2 for a in x)
    if spread == 0:
        raise ValueError("x must hold at least two different values")
    b = math.fsum((p - mx) * (q - my) for p, q in zip(x, y, strict=True)) / spread
    if len(x) == 2:
        return Interval(b, -math.inf, math.inf)
    residual = math.fsum((q - my - b * (p - mx)) ** 2 for p, q in zip(x, y, strict=True))
    half = t_quantile(confidence, len(x) - 2) * math.sqrt(residual / (len(x) - 2) / spread)
    return Interval(b, b - half, b + half)


def log_slope(x: Sequence[float], y: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The exponent p of ``y ~ x^p``: the slope of log y on log x."""
    return slope([math.log(v) for v in x], [math.log(v) for v in y], confidence)


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    """The share of y's variance that a straight line in x explains."""
    b, mx, my = slope(x, y).mean, mean(x), mean(y)
    total = math.fsum((q - my) ** 2 for q in y)
    left = math.fsum((q - my - b * (p - mx)) ** 2 for p, q in zip(x, y, strict=True))
    return 1.0 if total == 0 else 1 - left / total


def select(rows: Iterable[Row], **cell: Any) -> list[Row]:
    """The rows whose cell has these settings, by seed."""
    return sorted((r for r in rows if all(r.cell.get(k) == v for k, v in cell.items())), key=lambda r: r.seed)


def values(rows: Iterable[Row], name: str, **cell: Any) -> list[float]:
    """One number of the result of each row that has these settings, by seed."""
    return [row.result[name] for row in select(rows, **cell)]


def settings(rows: Iterable[Row], name: str) -> list[Any]:
    """The different values of one setting, in the order of the rows."""
    return list(dict.fromkeys(row.cell[name] for row in rows))


def over_seeds(rows: Iterable[Row], reduce: Callable[[list[Row]], float]) -> Interval:
    """A number that each seed's rows give (a slope, a ratio), with its interval over seeds."""
    by_seed: dict[int, list[Row]] = {}
    for row in rows:
        by_seed.setdefault(row.seed, []).append(row)
    return t_interval([reduce(found) for _, found in sorted(by_seed.items())])


def t_quantile(confidence: float, degrees: int) -> float:
    """The two-sided quantile of Student's t distribution."""
    try:
        from scipy.stats import t
    except ImportError as error:
        raise ImportError("intervals need scipy: pip install 'normkit[lab]'") from error
    return float(t.ppf((1 + confidence) / 2, degrees))
