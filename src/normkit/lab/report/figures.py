"""Figures as SVG text, the same bytes for the same rows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from normkit.errors import described
from normkit.lab.verdicts import Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4,
    "figure.dpi": 100,
    "axes.prop_cycle": None,  # filled in below, where matplotlib is imported
}
COLOURS = ("#0b6e99", "#d9822b", "#3d8f5f", "#a4487d", "#6b6b6b", "#8c6d1f", "#5b5bd6", "#c23b3b")
SIZE = (6.4, 3.4)


def of_decision(decision: Decision) -> str:
    """The plot of a claim's rows as SVG; empty where there is none, or nothing to draw."""
    plot = decision.claim.plot
    if plot is None or not decision.rows:
        return ""
    return svg(lambda axes: plot(list(decision.rows), axes), salt=decision.claim.id)


def svg(draw: Callable[[Axes], None], *, salt: str, size: tuple[float, float] = SIZE) -> str:
    """One figure as an SVG element. A plot that raises gives a figure that says why.

    ``salt`` makes the ids inside different from those of every other figure on the page.
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "svg.hashsalt": salt, "axes.prop_cycle": cycler(color=COLOURS)}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        try:
            draw(axes)
        except Exception as error:
            axes.clear()
            axes.axis("off")
            axes.text(0.5, 0.5, f"no plot: {described(error)}", ha="center", va="center", wrap=True)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return _element(text.getvalue())


def _element(document: str) -> str:
    """The svg element of a document, without its prolog, metadata and trailing blanks."""
    element = document[document.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in element.splitlines()) + "\n"
