"""Small line charts as SVG: few colours, direct labels, a log scale where values span decades."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 460, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 128, 12, 38
_COLOURS = 4
_LOG_FROM = 30.0
_DEEPEST = 1e-5
"""What is smaller than this share of the largest value is drawn at the bottom of a log scale."""


@dataclass(frozen=True)
class Series:
    """One line: ``(x, y)`` in order of x, and perhaps a band from ``low`` to ``high`` at each point."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    """A chart: what its axes say, and its lines."""

    title: str
    note: str
    x_label: str
    series: tuple[Series, ...]
    zero_to_one: bool = False


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    log: bool

    def y(self, value: float) -> float:
        low, high, at = self.low, self.high, max(value, self.low)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return HEIGHT - _BOTTOM - min(1.0, share) * (HEIGHT - _TOP - _BOTTOM)

    def ticks(self) -> list[float]:
        """Three to six round values."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            step = max(1, (last - first) // 4)
            return [10.0**e for e in range(first, last + 1, step)]
        return list(_nice(self.low, self.high, 5))


def _nice(low: float, high: float, count: int) -> Iterator[float]:
    span = (high - low) or 1.0
    unit = 10 ** math.floor(math.log10(span / count))
    step = next(unit * f for f in (1, 2, 5, 10) if span / (unit * f) <= count)
    value = math.ceil(low / step - 1e-9) * step
    while value <= high + 1e-9 * span:
        yield value
        value += step


def _scale(chart: Chart) -> _Scale:
    values = [y for s in chart.series for _, y in s.points] + [v for s in chart.series for pair in s.band for v in pair]
    values = [v for v in values if math.isfinite(v)]
    if chart.zero_to_one:
        return _Scale(0.0, 1.0, False)
    positive = [v for v in values if v > 0]
    top = max(positive, default=1.0)
    if positive and top / min(positive) > _LOG_FROM:
        floor = max(min(positive), top * _DEEPEST)
        return _Scale(10.0 ** math.floor(math.log10(floor)), 10.0 ** math.ceil(math.log10(top)), True)
    return _Scale(0.0, top * 1.08, False)


def draw(chart: Chart) -> Markup:
    """The chart as an SVG image."""
    scale = _scale(chart)
    xs = [x for s in chart.series for x, _ in s.points]
    low, high = min(xs), max(xs)

    def across(x: float) -> float:
        return _LEFT + ((x - low) / (high - low) if high > low else 0.5) * (WIDTH - _LEFT - _RIGHT)

    parts = [*_grid(scale, low, high, chart.x_label, across)]
    for number, series in enumerate(chart.series):
        colour = f"s{number}" if number < _COLOURS else "s-other"
        parts += _line(series, scale, across, colour)
    parts += _labels(chart.series, scale)
    head = Markup('<svg class="chart" viewBox="0 0 {w} {h}" role="img" aria-label="{t}"><title>{t}</title>').format(
        w=WIDTH, h=HEIGHT, t=f"{chart.title}: {chart.note}"
    )
    return head + Markup("").join(parts) + Markup("</svg>")


def _grid(scale: _Scale, low: float, high: float, x_label: str, across: object) -> Iterator[Markup]:
    right = WIDTH - _RIGHT
    for tick in scale.ticks():
        y = scale.y(tick)
        yield Markup('<line class="grid" x1="{a}" y1="{y:.1f}" x2="{b}" y2="{y:.1f}"/>').format(a=_LEFT, b=right, y=y)
        yield Markup('<text class="tick" x="{x}" y="{y:.1f}" text-anchor="end">{t}</text>').format(
            x=_LEFT - 7, y=y + 4, t=_number(tick)
        )
    for tick in _nice(low, high, 6):
        if tick == int(tick):
            yield Markup('<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{t}</text>').format(
                x=across(tick),  # type: ignore[operator]
                y=HEIGHT - _BOTTOM + 16,
                t=int(tick),
            )
    yield Markup('<text class="tick" x="{x:.0f}" y="{y}" text-anchor="middle">{t}</text>').format(
        x=(_LEFT + right) / 2, y=HEIGHT - 5, t=x_label + (", log scale" if scale.log else "")
    )


def _line(series: Series, scale: _Scale, across: object, colour: str) -> Iterator[Markup]:
    points = [(across(x), scale.y(y)) for x, y in series.points if math.isfinite(y)]  # type: ignore[operator]
    if series.band:
        xs = [across(x) for x, _ in series.points]  # type: ignore[operator]
        upper = [f"{x:.1f},{scale.y(b):.1f}" for x, (_, b) in zip(xs, series.band, strict=True)]
        lower = [f"{x:.1f},{scale.y(a):.1f}" for x, (a, _) in zip(xs, series.band, strict=True)]
        yield Markup('<polygon class="band {c}" points="{p}"/>').format(c=colour, p=" ".join(upper + lower[::-1]))
    if len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield Markup('<polyline class="line {c}" points="{p}"/>').format(c=colour, p=path)
    if len(points) <= 40:
        for x, y in points:
            yield Markup('<circle class="dot {c}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>').format(c=colour, x=x, y=y)


def _labels(series: Sequence[Series], scale: _Scale) -> Iterator[Markup]:
    """Each line's name beside its last point, moved apart where they would meet."""
    ends = [(scale.y(s.points[-1][1]), n, s.name) for n, s in enumerate(series) if s.points and s.name]
    placed: list[tuple[float, int, str]] = []
    for y, number, name in sorted(ends):
        above = placed[-1][0] + 14 if placed else -math.inf
        placed.append((max(y + 4, above), number, name))
    overflow = placed[-1][0] - (HEIGHT - _BOTTOM + 4) if placed else 0.0
    for y, number, name in placed:
        colour = f"s{number}" if number < _COLOURS else "s-other"
        text = name if len(name) <= 17 else name[:15] + "…"
        yield Markup('<text class="label {c}" x="{x}" y="{y:.1f}"><title>{n}</title>{t}</text>').format(
            c=colour, x=WIDTH - _RIGHT + 8, y=y - max(0.0, overflow), n=name, t=text
        )


def _number(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.3g}"
