"""The last feed-forward layer's gradient against width in Post-LN at initialization."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import WRONG, graded, numbers, within
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.single import last_gradient, single_model
from normkit.lab.setups.statistics import log_slope, over_seeds, select, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADS = ("of variance 1 / d", "of variance 1")


def cells(quick: bool) -> list[Cell]:
    """Two heads: one that gives logits of variance 1, and one whose weights have it (its logits grow with d)."""
    dims, samples = ((32, 64, 128), 4) if quick else ((32, 64, 128, 256, 512), 32)
    return [{"head": h, "dim": d, "depth": 4, "samples": samples} for h in HEADS for d in dims]


def measure(seed: int, head: str, dim: int, depth: int, samples: int) -> dict[str, Any]:
    """The mean gradient norm over single samples."""
    with seeded(seed):
        scale = 1.0 if head == "of variance 1" else dim**-0.5
        return {"gradient": last_gradient(single_model("post", depth, dim), samples, scale)}


def exponent(rows: list[Row]) -> float:
    """The slope of log gradient in log width, of one seed's rows."""
    return log_slope([r.cell["dim"] for r in rows], [r.result["gradient"] for r in rows]).mean


def judge(rows: list[Row]) -> Verdict:
    """See ``CRITERION``."""
    dims = settings(rows, "dim")
    claimed = log_slope(dims, [d * math.sqrt(math.log(d)) for d in dims]).mean
    found = {h: over_seeds(select(rows, head=h), exponent) for h in settings(rows, "head")}
    shown = "; ".join(f"{i} with a head {h}" for h, i in found.items())
    return Verdict(
        graded((within(i, claimed - 0.15, claimed + 0.15) for i in found.values()), WRONG),
        f"d sqrt(ln d) has the exponent {claimed:.3g} between d {min(dims)} and {max(dims)}; measured: {shown}",
        numbers(**{h.replace(" ", "_").replace("/", "over"): i for h, i in found.items()}) | {"claimed": claimed},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Gradient against width."""
    lines(axes, rows, "dim", "gradient", "head", log="xy")


CLAIM = Claim(
    id="xiong-width",
    kind="measured",
    statement="The gradient of Post-LN's last feed-forward layer grows with the width d as d sqrt(ln d).",
    source="Xiong et al. 2020, arXiv:2002.04745 (an upper bound there); a tutorial gives it as the size",
    criterion="the exponent of the gradient's norm in d (95 % t-interval over seeds) lies within 0.15 of that of "
    "d sqrt(ln d) over the same widths, with logits of variance 1 and with head weights of variance 1; within limits "
    "if with one of them; wrong as stated if with none",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
