"""An explanation on the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from normkit.explain.steps import Explanation, Step

if TYPE_CHECKING:
    from rich.console import Console


def show(explained: Explanation, console: Console, *, digits: int = 4, most: int = 8) -> None:
    """Print every step with its numbers, the geometry and the gradient.

    Args:
        explained: what `normkit.explain.explain` returned.
        console: a rich console.
        digits: significant digits after the first.
        most: how many elements of a set are printed; the rest is counted.
    """
    from rich.table import Table

    console.print(explained.title, style="bold", highlight=False)
    console.print(explained.formula, highlight=False)
    console.print(f"input {list(explained.shape)} {explained.dtype}: {where(explained)}\n", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for column in ("step", "formula", "values", "precision"):
        table.add_column(column, no_wrap=column in ("step", "values"), style="dim" if column == "precision" else "")
    for step in explained.steps:
        precision = "" if step.dtype == explained.steps[0].dtype and not step.note else step.note or step.dtype
        table.add_row(step.symbol, step.formula, numbers(step, digits, most), precision)
    console.print(table, highlight=False)
    console.print("\nas a vector", style="bold")
    for line in geometry(explained, digits):
        console.print(f"  {line}", highlight=False)
    console.print("\ngradient", style="bold")
    for line in gradient(explained, digits, most):
        console.print(f"  {line}", highlight=False)


def where(explained: Explanation) -> str:
    """Which set is shown."""
    n = len(explained.where)
    if explained.sets == 1:
        return f"one statistic for all {n} elements"
    at = ", ".join(map(str, explained.at))
    return f"{explained.sets} statistics; shown is the one of element [{at}], {n} elements"


def numbers(step: Step, digits: int = 4, most: int = 8) -> str:
    """A step's values, the middle of a long one left out."""
    return _some(step.values, digits, most)


def geometry(explained: Explanation, digits: int = 4) -> list[str]:
    """What the normalization does to the set as a vector."""
    g, spec = explained.geometry, explained.spec
    lines = [f"length {number(g.length, digits)}, of which {number(g.along_ones, digits)} along the all-ones direction"]
    if spec.centered:
        lines.append("centering projects that part away; the rest keeps its direction")
    else:
        lines.append("nothing is projected away: x̂ points where x points")
    ideal = f"sqrt({g.n})" if spec.statistic == "mean_square" else f"sqrt({g.n} - 1)"
    ideal = "1" if spec.statistic == "sum" else f"{ideal} = {number(g.ideal_radius, digits)}"
    given = any(s.note.startswith("stored") for s in explained.steps)
    if given:
        lines.append(f"x̂ has length {number(g.radius, digits)}: by stored statistics there is no fixed radius")
    else:
        lines.append(f"x̂ lies on the sphere of radius {ideal}; with eps its length is {number(g.radius, digits)}")
    if not (math.isfinite(g.length) and math.isfinite(g.radius)):
        lines.append("no direction: not every number is finite")
    elif math.isnan(g.cosine):
        lines.append(f"no direction: {'x' if g.length == 0 else 'x̂'} is zero")
    else:
        lines.append(f"cos(x, x̂) = {number(g.cosine, digits)}")
    return lines


def gradient(explained: Explanation, digits: int = 4, most: int = 8) -> list[str]:
    """The gradient's formula and one column of its matrix."""
    found = explained.gradient
    return [
        found.formula,
        f"a gradient of 1 on output [{', '.join(map(str, explained.at))}] gives the set's inputs",
        _some(found.dx, digits, most),
        f"sum(dx) = {number(found.along_ones, digits)}, sum(dx x̂) = {number(found.along_unit, digits)}",
    ]


def number(value: float, digits: int = 4) -> str:
    """A number with ``digits`` digits after the point, or in scientific form where that hides it."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 10.0**-digits * 10 <= abs(value) < 1e5:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}g}"


def _some(values: tuple[float, ...], digits: int, most: int) -> str:
    if len(values) <= most:
        return "  ".join(number(v, digits) for v in values)
    head, tail = values[: most - 2], values[-1:]
    shown = [*(number(v, digits) for v in head), "...", *(number(v, digits) for v in tail)]
    return "  ".join(shown) + f"  ({len(values)})"
