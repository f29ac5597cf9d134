"""Plots that many claims share: means over seeds with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Row
from normkit.lab.setups.statistics import settings, t_interval, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _mean(rows: Sequence[Row], y: str, **cell: Any) -> tuple[float, float] | None:
    """(mean, half of the interval) of the finite values; None where there are none."""
    found = [v for v in values(rows, y, **cell) if math.isfinite(v)]
    if not found:
        return None
    interval = t_interval(found)
    return interval.mean, interval.half if math.isfinite(interval.half) else 0.0


def lines(
    axes: Axes, rows: Sequence[Row], x: str, y: str, by: str, *, log: str = "", dashed: bool = False, **cell: Any
) -> None:
    """One line for each value of the setting ``by``: the number ``y`` against the setting ``x``, with its interval.

    ``log`` names the axes that are logarithmic: ``"x"``, ``"y"`` or ``"xy"``. ``cell`` picks rows. Dashed lines take
    the same colours again, and no place in the legend.
    """
    style = {"linestyle": "--" if dashed else "-", "marker": "o", "capsize": 3}
    for n, name in enumerate(settings(rows, by)):
        points = [(v, m) for v in settings(rows, x) if (m := _mean(rows, y, **{x: v, by: name}, **cell)) is not None]
        if points:
            at, found = zip(*points, strict=True)
            shown = None if dashed else str(name)
            axes.errorbar(at, [m for m, _ in found], [h for _, h in found], color=f"C{n}", label=shown, **style)
    if "x" in log:
        axes.set_xscale("log", base=2)
        at = [v for v in settings(rows, x) if isinstance(v, (int, float))]
        if len(at) <= 12:  # the settings themselves, not powers that lie between them
            axes.set_xticks(at, [f"{v:g}" for v in at])
            axes.minorticks_off()
    if "y" in log:
        axes.set_yscale("log")
    axes.set_xlabel(label(x))
    axes.set_ylabel(label(y))
    axes.legend(title=label(by))


def bars(axes: Axes, rows: Sequence[Row], by: str, *ys: str, unit: str = "", log: bool = False, **cell: Any) -> None:
    """A group of bars for each value of the setting ``by``: the numbers ``ys`` with their intervals.

    ``unit`` is what they have in common; a single number needs none.
    """
    names = settings(rows, by)
    width = 0.8 / len(ys)
    for n, y in enumerate(ys):
        found = [_mean(rows, y, **{by: name}, **cell) or (0.0, 0.0) for name in names]
        at = [k + (n - (len(ys) - 1) / 2) * width for k in range(len(names))]
        axes.bar(at, [m for m, _ in found], width, yerr=[h for _, h in found], capsize=3, label=label(y))
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    axes.set_xlabel(label(by))
    if log:
        axes.set_yscale("log")
    axes.set_ylabel(unit or label(ys[0]))
    if len(ys) > 1:
        axes.legend(fontsize="small")


def label(name: str) -> str:
    """A setting's name for people."""
    return name.replace("_", " ")
