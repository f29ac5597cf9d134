"""The largest learning rate that still trains, with BatchNorm and without."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.digits import batches, digits
from normkit.lab.setups.judging import NOT_SEEN, numbers
from normkit.lab.setups.mlp import mlp
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select
from normkit.lab.setups.training import accuracy, classification, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINED = 90.0


def cells(quick: bool) -> list[Cell]:
    """Nets by learning rate, in factors of two."""
    exponents, epochs = ((-4, 0, 4), 2) if quick else (range(-5, 8), 12)
    return [{"norm": n, "rate": 2.0**k, "epochs": epochs} for n in ("none", "batch") for k in exponents]


def measure(seed: int, norm: Any, rate: float, epochs: int) -> dict[str, Any]:
    """Test accuracy in per cent after SGD."""
    with seeded(seed):
        data = digits()
        model = mlp(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        train(classification(model, batches(data.train_x, data.train_y, 64, epochs)), optimizer)
        model.eval()
        return {"accuracy": 100 * accuracy(model, data.test_x, data.test_y)}


def boundary(rows: list[Row]) -> float:
    """log2 of the largest rate at which one seed's net is trained; below the smallest rate where none is."""
    good = [r.cell["rate"] for r in rows if r.result["accuracy"] >= TRAINED]
    return math.log2(max(good, default=min(r.cell["rate"] for r in rows) / 2))


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    edge = {n: over_seeds(select(rows, norm=n), boundary) for n in ("none", "batch")}

    def both(found: list[Row]) -> float:
        return boundary(select(found, norm="batch")) - boundary(select(found, norm="none"))

    gap = over_seeds(rows, both)
    outcome = "holds" if gap.low > 1 else "holds within limits" if gap.low > 0 else NOT_SEEN
    return Verdict(
        outcome,
        f"the largest rate that trains is 2^{edge['batch']} with BatchNorm and 2^{edge['none']} without: "
        f"{2**gap.mean:.3g} [{2**gap.low:.3g}, {2**gap.high:.3g}] times as large",
        numbers(log2_ratio=gap, log2_batch=edge["batch"], log2_none=edge["none"]),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Accuracy against learning rate."""
    lines(axes, rows, "rate", "accuracy", "norm", log="x")


CLAIM = Claim(
    id="batchnorm-lr",
    kind="measured",
    statement="BatchNorm permits a higher learning rate.",
    source="Ioffe and Szegedy 2015, arXiv:1502.03167, and tutorials",
    criterion="the largest rate (of a sweep in factors of two) at which the net reaches 90 % test accuracy is more than "
    "twice as large with BatchNorm (lower end of the 95 % t-interval of log2 over seeds); within limits if clearly "
    "larger at all",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
