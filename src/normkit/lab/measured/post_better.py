"""Post-LN's final quality against Pre-LN's, each at its best learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, WRONG, best, gain, numbers
from normkit.lab.setups.language import language_model, train_language
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    """Placements by depth and learning rate, all with warm-up."""
    depths, steps, rates = ((2,), 6, (3e-3,)) if quick else ((2, 6), 300, (2e-3, 6e-3))
    return [
        {"placement": p, "depth": d, "rate": r, "steps": steps} for p in ("post", "pre") for d in depths for r in rates
    ]


def measure(seed: int, placement: str, depth: int, rate: float, steps: int) -> dict[str, Any]:
    """The validation loss of a character model."""
    with seeded(seed):
        model = language_model(placement=placement, depth=depth)
        return {"loss": train_language(model, steps=steps, rate=rate, warm_up=steps // 5).validation}


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    depths = list(dict.fromkeys(r.cell["depth"] for r in rows))
    found = {}
    for d in depths:
        cell = {p: {"placement": p, "depth": d} for p in ("post", "pre")}
        for own in cell.values():
            own["rate"] = best(rows, "loss", "rate", **own)
        found[d] = gain(rows, "loss", better=cell["post"], than=cell["pre"])
    better, worse = [i.low > 0 for i in found.values()], [i.high < 0 for i in found.values()]
    if all(better):
        outcome = "holds"
    else:
        outcome = "holds within limits" if any(better) else WRONG if all(worse) else NOT_SEEN
    shown = ", ".join(f"{i} nats at {d} layers" for d, i in found.items())
    return Verdict(
        outcome,
        f"Post-LN's validation loss is below Pre-LN's by {shown} (below 0: above it), each at its best rate; a few "
        f"hundred steps say nothing of long training",
        numbers(**{f"post_gain_{d}": i for d, i in found.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Loss against learning rate at the largest depth."""
    lines(axes, rows, "rate", "loss", "placement", log="x", depth=max(r.cell["depth"] for r in rows))


CLAIM = Claim(
    id="post-better",
    kind="measured",
    statement="Post-LN's final quality is better than Pre-LN's when it trains.",
    source="a tutorial's statement; another says that it cannot be said so simply",
    criterion="each at its best learning rate and with warm-up, Post-LN's validation loss is lower (95 % t-interval "
    "over seeds, paired) at every depth; within limits if at some; wrong as stated if it is higher at every depth",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
