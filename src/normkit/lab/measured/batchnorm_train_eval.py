"""BatchNorm where training and running statistics do and do not match."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.digits import batches, digits
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.mlp import mlp
from normkit.lab.setups.plotting import bars
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import difference, select, values
from normkit.lab.setups.training import accuracy, classification, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    """BatchNorm beside LayerNorm."""
    return [{"norm": n, "epochs": 3 if quick else 15} for n in ("batch", "layer")]


def by_class(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean accuracy over batches of 16 sorted by class: what a stream that is not shuffled gives."""
    order = y.argsort()
    found = [accuracy(model, x[part], y[part]) for part in order.split(16) if len(part) == 16]
    return sum(found) / len(found)


def measure(seed: int, norm: Any, epochs: int) -> dict[str, Any]:
    """Test accuracies in per cent: of test images and of shifted ones, with running and with batch statistics."""
    with seeded(seed):
        data = digits()
        model = mlp(norm, depth=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        train(classification(model, batches(data.train_x, data.train_y, 64, epochs)), optimizer)
    x, y = data.test_x, data.test_y
    shifted = 0.5 * x + 1.0
    found = {}
    for mode in ("evaluation", "training"):
        model.train(mode == "training")  # statistics of a batch do not depend on the running ones, which move here
        found[mode] = 100 * accuracy(model, x, y)
        found[f"shifted_{mode}"] = 100 * accuracy(model, shifted, y)
        found[f"sorted_{mode}"] = 100 * by_class(model, x, y)
    return found


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    batch, layer = select(rows, norm="batch"), select(rows, norm="layer")
    matched = difference(values(batch, "evaluation"), values(batch, "training"))
    forgotten = difference(values(batch, "sorted_evaluation"), values(batch, "sorted_training"))
    stale = difference(values(batch, "shifted_training"), values(batch, "shifted_evaluation"))
    pairs = (("evaluation", "training"), ("sorted_evaluation", "sorted_training"))
    layer_gap = max(
        abs(a - b) for one, two in pairs for a, b in zip(values(layer, one), values(layer, two), strict=True)
    )
    checks = (forgotten.low > 5, stale.low > 5)
    agrees = -3 < matched.low and matched.high < 3 and layer_gap == 0
    return Verdict(
        graded((*checks, agrees)) if any(checks) else "not reproduced at this scale",
        f"with matching statistics BatchNorm's two modes differ by {matched} points; batches of one class lose "
        f"{forgotten} points in training mode, shifted images lose {stale} points to running statistics against their "
        f"own; LayerNorm's modes differ by {layer_gap:g}",
        numbers(matched=matched, forgotten_eval=forgotten, stale=stale) | {"layer": layer_gap},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Accuracies by mode and data."""
    names = [f"{data}{mode}" for data in ("", "sorted_", "shifted_") for mode in ("evaluation", "training")]
    bars(axes, rows, "norm", *names)


CLAIM = Claim(
    id="batchnorm-train-eval",
    kind="measured",
    statement="BatchNorm's training and evaluation modes disagree when running statistics do not match the data.",
    source="tutorials' statement",
    criterion="accuracies in the two modes agree within 3 points on data like the training data (95 % t-interval over "
    "seeds, LayerNorm's exactly), and differ by more than 5 points (lower end) both when eval() is forgotten on batches "
    "sorted by class, and when the input is shifted and running statistics are used; within limits if in one case",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
