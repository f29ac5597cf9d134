"""The last feed-forward layer's gradient against depth at initialization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import graded, numbers, within
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.single import last_gradient, single_model
from normkit.lab.setups.statistics import log_slope, over_seeds, select, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHALLOWEST = 8  # below it the embedding's part of the stream hides the exponent


def cells(quick: bool) -> list[Cell]:
    """Placements, widths and depths; one model each."""
    dims, depths, samples = ((32,), (8, 16), 4) if quick else ((64, 128), (2, 8, 16, 32, 64), 8)
    return [
        {"placement": p, "dim": d, "depth": n, "samples": samples}
        for p in ("post", "pre")
        for d in dims
        for n in depths
    ]


def measure(seed: int, placement: str, dim: int, depth: int, samples: int) -> dict[str, Any]:
    """The mean gradient norm over single samples."""
    with seeded(seed):
        return {"gradient": last_gradient(single_model(placement, depth, dim), samples)}


def exponent(rows: list[Row]) -> float:
    """The slope of log gradient in log depth, of one seed's rows."""
    deep = [r for r in rows if r.cell["depth"] >= SHALLOWEST]
    return log_slope([r.cell["depth"] for r in deep], [r.result["gradient"] for r in deep]).mean


def judge(rows: list[Row]) -> Verdict:
    """See ``CRITERION``."""
    slopes = {
        (p, d): over_seeds(select(rows, placement=p, dim=d), exponent)
        for p in ("post", "pre")
        for d in settings(rows, "dim")
    }
    flat = [within(i, -0.15, 0.15) for (p, _), i in slopes.items() if p == "post"]
    root = [within(i, -0.65, -0.35) for (p, _), i in slopes.items() if p == "pre"]
    shown = "; ".join(f"{p} at d {d}: {i}" for (p, d), i in slopes.items())
    return Verdict(
        graded((*flat, *root)),
        f"exponents of the gradient in depth from {SHALLOWEST} layers on: {shown}",
        numbers(**{f"{p}_{d}": i for (p, d), i in slopes.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Gradient against depth at the largest width."""
    lines(axes, rows, "depth", "gradient", "placement", log="xy", dim=max(settings(rows, "dim")))


CLAIM = Claim(
    id="xiong-gradient",
    kind="measured",
    statement="At initialization the last feed-forward layer's gradient does not depend on the depth L with Post-LN, "
    "and falls as L^(-1/2) with Pre-LN.",
    source="Xiong et al. 2020, arXiv:2002.04745",
    criterion="at every width the exponent of the gradient's norm in L (least squares of logarithms, L >= 8; 95 % "
    "t-interval over seeds) lies within ±0.15 of 0 for Post-LN and of -0.5 for Pre-LN; within limits if at some only",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
