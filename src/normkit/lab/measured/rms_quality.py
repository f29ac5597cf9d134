"""RMSNorm against LayerNorm: the validation loss of the same small language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.equivalence import CLOSE, judge_equal, loss_with
from normkit.lab.setups.plotting import bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NORMS = ("layer", "rms")


def cells(quick: bool) -> list[Cell]:
    """Two norms, all else equal."""
    depth, steps = (1, 6) if quick else (4, 250)
    return [{"norm": n, "depth": depth, "steps": steps, "rate": 3e-3} for n in NORMS]


def measure(seed: int, norm: str, depth: int, steps: int, rate: float) -> dict[str, Any]:
    """The validation loss of a character model."""
    return {"loss": loss_with(norm, seed=seed, depth=depth, steps=steps, rate=rate)}


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    return judge_equal(rows, *NORMS)


def plot(rows: list[Row], axes: Axes) -> None:
    """The two losses."""
    bars(axes, rows, "norm", "loss")
    losses = [row.result["loss"] for row in rows]
    axes.set_ylim(min(losses) - CLOSE, max(losses) + CLOSE)


CLAIM = Claim(
    id="rms-quality",
    kind="measured",
    statement="RMSNorm's quality matches LayerNorm's.",
    source="Zhang and Sennrich 2019, arXiv:1910.07467, and tutorials",
    criterion=f"the two validation losses, paired by seed, differ by less than {CLOSE} nats a character (whole 95 % "
    "t-interval over seeds); within limits if the mean does and the interval reaches further; wrong as stated if the "
    "interval lies outside",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=5,
)
