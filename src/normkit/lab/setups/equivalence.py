"""Claims that two norms are equally good: the same small language model with each, all else equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, WRONG, numbers, within
from normkit.lab.setups.language import language_model, train_language
from normkit.lab.setups.plotting import bars
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import difference, t_interval, values
from normkit.spec import TORCH_LAYER, NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLOSE = 0.03
"""Nats a character: about what another seed changes."""
RMS = NormSpec(centered=False, eps=1e-5)
NORMS = {"layer": TORCH_LAYER, "rms": RMS, "rms with bias": RMS.replace(has_bias=True)}


CRITERION = (
    f"the two validation losses, paired by seed, differ by less than {CLOSE} nats a character (whole 95 % "
    "t-interval over seeds); within limits if the mean does and the interval reaches further; wrong as stated if the "
    "interval lies outside"
)


def cells_of(norms: Sequence[str], quick: bool) -> list[Cell]:
    """Some norms, all else equal."""
    depth, steps = (1, 6) if quick else (4, 250)
    return [{"norm": n, "depth": depth, "steps": steps, "rate": 3e-3} for n in norms]


def measure(seed: int, norm: str, depth: int, steps: int, rate: float) -> dict[str, Any]:
    """The validation loss of a Pre-LN character model with that norm."""
    with seeded(seed):
        model = language_model(norm=NORMS[norm], depth=depth)
        return {"loss": train_language(model, steps=steps, rate=rate, warm_up=steps // 10).validation}


def judge_equal(rows: Sequence[Row], one: str, other: str) -> Verdict:
    """Whether two norms' losses, paired by seed, are within `CLOSE` of each other."""
    gap = difference(values(rows, "loss", norm=other), values(rows, "loss", norm=one))
    losses = {n: t_interval(values(rows, "loss", norm=n)) for n in (one, other)}
    if within(gap, -CLOSE, CLOSE):
        outcome = "holds"
    elif gap.low > CLOSE or gap.high < -CLOSE:
        outcome = WRONG
    else:
        outcome = "holds within limits" if abs(gap.mean) < CLOSE else NOT_SEEN
    return Verdict(
        outcome,
        f"{other} {losses[other]} against {one} {losses[one]} nats a character: a difference of {gap}",
        numbers(difference=gap, **{n.replace(" ", "_"): i for n, i in losses.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """The two losses."""
    bars(axes, rows, "norm", "loss")
    losses = [row.result["loss"] for row in rows]
    axes.set_ylim(min(losses) - CLOSE, max(losses) + CLOSE)
