"""What exact claims share: data from a seed, and small plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.lab.claim import Outcome, Row, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXACT = 1e-11
"""Relative error that float64 may leave after a few thousand operations: about 5e4 of its unit roundoffs."""


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers from a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    """The largest deviation, relative to the largest wanted value."""
    scale = wanted.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((got.double() - wanted.double()).abs().max() / scale)


def worst(rows: Sequence[Row], name: str) -> float:
    """The largest value of one number over the rows."""
    return max(row.result[name] for row in rows)


def least(rows: Sequence[Row], name: str) -> float:
    """The smallest value of one number over the rows."""
    return min(row.result[name] for row in rows)


def holds_if(condition: bool, because: str, **numbers: float | str) -> Verdict:
    """The verdict of plain arithmetic: it holds, or is wrong as stated."""
    outcome: Outcome = "holds" if condition else "wrong as stated"
    return Verdict(outcome, because, numbers)


def bars(axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], *, ylabel: str = "") -> None:
    """Grouped bars: one group a label, one colour a series."""
    width = 0.8 / len(series)
    for n, (name, heights) in enumerate(series.items()):
        axes.bar([g + (n - (len(series) - 1) / 2) * width for g in range(len(groups))], heights, width, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.axhline(0, color="0.4", linewidth=0.8)
    axes.set_ylabel(ylabel)
    if len(series) > 1:
        axes.legend()


def lines(
    axes: Axes,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    log: str = "",
) -> None:
    """One marked line a series; ``log`` names the logarithmic axes, as in ``"xy"``."""
    for name, y in series.items():
        axes.plot(x, y, marker="o", label=name)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend()


def errors(axes: Axes, names: Sequence[str], heights: Sequence[float]) -> None:
    """Errors as horizontal bars on a logarithmic axis; zero is drawn at the left end."""
    floor = 1e-18
    axes.barh(range(len(names)), [max(h, floor) for h in heights], left=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(floor, max(10.0, *heights))
    axes.set_xlabel("relative error")
    for n, height in enumerate(heights):
        axes.annotate(f"{height:.1e}", (max(height, floor), n), xytext=(4, 0), textcoords="offset points", va="center")


def table(axes: Axes, columns: Sequence[str], lines_: Sequence[Sequence[Any]]) -> None:
    """Text in rows and columns, where numbers are few."""
    axes.axis("off")
    drawn = axes.table(cellText=[[str(v) for v in line] for line in lines_], colLabels=list(columns), loc="center")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    drawn.auto_set_column_width(list(range(len(columns))))
    for (row, _), cell in drawn.get_celld().items():
        cell.set_edgecolor("0.8")
        if row == 0:
            cell.set_text_props(weight="bold")
