"""DeepNorm with the gain of its initialization the wrong way up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import best, gain, graded, numbers
from normkit.lab.setups.language import language_model, train_language
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import settings
from normkit.placement import placement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXPONENTS = {"(8L)^(-1/4)": -0.25, "(8L)^(+1/4)": 0.25}


def cells(quick: bool) -> list[Cell]:
    """Both gains by learning rate."""
    depth, steps, rates = (2, 6, (1e-2,)) if quick else (12, 150, (1e-3, 3e-3))
    return [{"gain": g, "rate": r, "depth": depth, "steps": steps} for g in EXPONENTS for r in rates]


def measure(seed: int, gain: str, rate: float, depth: int, steps: int) -> dict[str, Any]:
    """The validation loss of a character model, without warm-up."""
    wiring = replace(placement("deepnorm", depth=depth), init_gain=(8 * depth) ** EXPONENTS[gain])
    with seeded(seed):
        model = language_model(placement=wiring, depth=depth)
        return {"loss": train_language(model, steps=steps, rate=rate).validation}


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    right, inverted = EXPONENTS
    same = {
        r: gain(rows, "loss", better={"gain": right, "rate": r}, than={"gain": inverted, "rate": r})
        for r in settings(rows, "rate")
    }
    tuned = gain(
        rows,
        "loss",
        better={"gain": right, "rate": best(rows, "loss", "rate", gain=right)},
        than={"gain": inverted, "rate": best(rows, "loss", "rate", gain=inverted)},
    )
    shown = ", ".join(f"{i} at {r:g}" for r, i in same.items())
    return Verdict(
        graded([tuned.low > 0.05, *(i.low > 0.05 for i in same.values())]),
        f"the inverted gain raises the validation loss by {tuned} nats, each at its best rate; at the same rate by {shown}",
        numbers(tuned=tuned, **{f"rate_{r:g}": i for r, i in same.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Loss against learning rate."""
    lines(axes, rows, "rate", "loss", "gain", log="x")


CLAIM = Claim(
    id="deepnorm-inverted-beta",
    kind="measured",
    statement="A baseline that initializes DeepNorm with (8L)^(+1/4) in place of (8L)^(-1/4) puts it at a disadvantage.",
    source="a published baseline's code; the right gain is in Wang et al. 2022, arXiv:2203.00555",
    criterion="the inverted gain's validation loss is more than 0.05 nats higher (lower end of the 95 % t-interval over "
    "seeds) at each learning rate, and with each at its best rate; within limits if in some of these",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
