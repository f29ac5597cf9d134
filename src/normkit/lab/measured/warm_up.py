"""Learning-rate warm-up for Post-LN, Pre-LN and DeepNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import best, gain, graded, numbers
from normkit.lab.setups.language import language_model, train_language
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import Interval, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLACEMENTS = ("post", "pre", "deepnorm")
MATTERS = 0.05


def cells(quick: bool) -> list[Cell]:
    """Placements, with and without warm-up, by learning rate."""
    depth, steps, rates = (2, 6, (3e-3,)) if quick else (12, 160, (1e-3, 3e-3))
    return [
        {"placement": p, "warm_up": w, "rate": r, "depth": depth, "steps": steps}
        for p in PLACEMENTS
        for w in (0, steps // 4)
        for r in rates
    ]


def measure(seed: int, placement: str, warm_up: int, rate: float, depth: int, steps: int) -> dict[str, Any]:
    """The validation loss of a character model."""
    with seeded(seed):
        model = language_model(placement=placement, depth=depth)
        return {"loss": train_language(model, steps=steps, rate=rate, warm_up=warm_up).validation}


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    _, warm = sorted(settings(rows, "warm_up"))
    rates = settings(rows, "rate")

    def helps(placement: str, cold_rate: float, warm_rate: float) -> Interval:
        return gain(
            rows,
            "loss",
            better={"placement": placement, "warm_up": warm, "rate": warm_rate},
            than={"placement": placement, "warm_up": 0, "rate": cold_rate},
        )

    at = {(p, w): best(rows, "loss", "rate", placement=p, warm_up=w) for p in PLACEMENTS for w in (0, warm)}
    tuned = {p: helps(p, at[p, 0], at[p, warm]) for p in PLACEMENTS}
    same = {(p, r): helps(p, r, r) for p in PLACEMENTS for r in rates}
    repaired = gain(
        rows,
        "loss",
        better={"placement": "deepnorm", "warm_up": 0, "rate": at["deepnorm", 0]},
        than={"placement": "post", "warm_up": 0, "rate": at["post", 0]},
    )
    post, pre = tuned["post"].low > MATTERS, tuned["pre"].high < MATTERS
    outcome = "holds" if post and pre and repaired.low > 0 else graded([False, post, repaired.low > 0])
    shown = "; ".join(f"{p} at {r:g}: {i}" for (p, r), i in same.items())
    return Verdict(
        outcome,
        f"warm-up lowers the loss, each at its best rate, by {tuned['post']} nats with Post-LN, {tuned['pre']} with "
        f"Pre-LN and {tuned['deepnorm']} with DeepNorm; at the same rate: {shown}; without warm-up DeepNorm is better "
        f"than Post-LN by {repaired}",
        numbers(**tuned, deepnorm_over_post=repaired, **{f"{p}_{r:g}": i for (p, r), i in same.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Loss without warm-up against the learning rate, and with it."""
    lines(axes, rows, "rate", "loss", "placement", log="x", warm_up=0)
    axes.set_prop_cycle(None)
    _, warm = sorted(settings(rows, "warm_up"))
    shown = len(axes.lines)
    lines(axes, rows, "rate", "loss", "placement", log="x", warm_up=warm)
    for line in axes.lines[shown:]:
        line.set_linestyle("--")
    axes.set_title("dashed: with warm-up")


CLAIM = Claim(
    id="warm-up",
    kind="measured",
    statement="Post-LN needs warm-up, Pre-LN does not; DeepNorm repairs Post-LN. (Not: Pre-LN is stable at any rate.)",
    source="Xiong et al. 2020, arXiv:2002.04745; Wang et al. 2022, arXiv:2203.00555; tutorials",
    criterion="each at its best learning rate, warm-up lowers Post-LN's validation loss by more than 0.05 nats (lower "
    "end of the 95 % t-interval over seeds) and Pre-LN's by less (upper end), and without warm-up DeepNorm's loss is "
    "below Post-LN's; within limits if only the first or the last",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
