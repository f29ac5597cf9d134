"""Sigmoid units with and without BatchNorm: how many are saturated, and whether the net trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.digits import batches, digits
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.mlp import mlp
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import difference, settings, t_interval, values
from normkit.lab.setups.training import accuracy, classification, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EDGE = 0.05  # a unit is saturated below it or above 1 - EDGE, where its slope is under a fifth of the largest
DEPTH = 6


def cells(quick: bool) -> list[Cell]:
    """Nets by the factor on their initial weights."""
    scales, epochs = ((1.0, 16.0), 2) if quick else ((1.0, 4.0, 16.0), 20)
    return [{"norm": n, "scale": s, "epochs": epochs} for n in ("none", "batch") for s in scales]


def measure(seed: int, norm: Any, scale: float, epochs: int) -> dict[str, Any]:
    """Test accuracy and the share of saturated hidden units after training, in per cent."""
    with seeded(seed), torch.no_grad():
        data = digits()
        model = mlp(norm, depth=DEPTH, act=nn.Sigmoid)
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.out_features != 10:
                module.weight.mul_(scale)
    with seeded(seed, 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(classification(model, batches(data.train_x, data.train_y, 64, epochs)), optimizer)
    model.eval()
    saturated: list[float] = []

    def note(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        saturated.append(((out < EDGE) | (out > 1 - EDGE)).float().mean().item())

    for layer in model[1 : DEPTH + 1]:
        layer.register_forward_hook(note)
    reached = accuracy(model, data.test_x, data.test_y)
    return {"accuracy": 100 * reached, "saturated": 100 * sum(saturated) / len(saturated)}


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    scales = settings(rows, "scale")

    def compare(name: str, scale: float, sign: int):
        found = (values(rows, name, norm=n, scale=scale) for n in ("batch", "none"))
        batch, none = found
        return difference(batch, none) if sign > 0 else difference(none, batch)

    trained = {s: compare("accuracy", s, 1) for s in scales}
    fewer = {s: compare("saturated", s, -1) for s in scales}
    checks = [trained[s].low > 5 for s in scales] + [fewer[s].low > 0 for s in scales]
    share = {n: t_interval(values(rows, "saturated", norm=n)) for n in ("none", "batch")}
    shown = "; ".join(f"weights x {s:g}: {trained[s]} points more accuracy, {fewer[s]} points fewer saturated"
                      for s in scales)  # fmt: skip
    return Verdict(
        graded(checks),
        f"BatchNorm against none, {shown}; {share['batch']} per cent of units are saturated with it and {share['none']} "
        f"without",
        numbers(
            **{f"accuracy_{s:g}": trained[s] for s in scales},
            **{f"fewer_saturated_{s:g}": fewer[s] for s in scales},
        ),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Share of saturated units against the weights' scale."""
    lines(axes, rows, "scale", "saturated", "norm", log="x")


CLAIM = Claim(
    id="batchnorm-saturation",
    kind="measured",
    statement="BatchNorm keeps sigmoid units out of saturation and makes deep sigmoid nets train.",
    source="Ioffe and Szegedy 2015, arXiv:1502.03167, and a tutorial",
    criterion="in a net of six sigmoid layers, at each scale of the initial weights, BatchNorm gains more than 5 points "
    "of test accuracy and leaves fewer units below 0.05 or above 0.95 (lower ends of the 95 % t-intervals over seeds); "
    "within limits if some of these",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
