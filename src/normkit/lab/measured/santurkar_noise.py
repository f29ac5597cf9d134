"""Noise after BatchNorm that shifts every layer's input at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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

NETS = ("plain", "batch", "noisy batch")


class ShiftingNoise(nn.Module):
    """Adds normal noise whose mean and spread are drawn anew for every unit at each training step."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mean, spread = torch.rand(x.shape[-1]) - 0.5, 1 + 0.25 * torch.rand(x.shape[-1])
        return spread * x + mean


class Drift:
    """How far the mean inputs of a layer move from step to step, in units of their spread."""

    def __init__(self, layer: nn.Module) -> None:
        self.moves: list[float] = []
        self.last: Tensor | None = None
        layer.register_forward_pre_hook(self.note)

    def note(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Compare a step's mean with the one before."""
        x = args[0].detach()
        mean = x.mean(0)
        if self.last is not None:
            self.moves.append(((mean - self.last).pow(2).mean() / x.var(0).mean().clamp(min=1e-12)).sqrt().item())
        self.last = mean


def cells(quick: bool) -> list[Cell]:
    """Nets by learning rate."""
    rates, epochs = ((0.5,), 2) if quick else ((0.1, 0.5, 1.0), 15)
    return [{"net": n, "rate": r, "epochs": epochs} for n in NETS for r in rates]


def measure(seed: int, net: str, rate: float, epochs: int) -> dict[str, Any]:
    """Test accuracy in per cent, and the drift of a middle layer's input."""
    with seeded(seed):
        data = digits()
        noisy = net == "noisy batch"
        model = mlp("none" if net == "plain" else "batch", after=ShiftingNoise if noisy else None)
        drift = Drift(model[3])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        train(classification(model, batches(data.train_x, data.train_y, 64, epochs)), optimizer)
        moves = list(drift.moves)
        model.eval()
        return {
            "accuracy": 100 * accuracy(model, data.test_x, data.test_y),
            "drift": sum(moves) / len(moves),
        }


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    rates = settings(rows, "rate")
    cost, benefit, shift = {}, {}, {}
    for r in rates:
        noisy = values(rows, "accuracy", net="noisy batch", rate=r)
        cost[r] = difference(values(rows, "accuracy", net="batch", rate=r), noisy)
        benefit[r] = difference(noisy, values(rows, "accuracy", net="plain", rate=r))
        shift[r] = difference(
            values(rows, "drift", net="noisy batch", rate=r), values(rows, "drift", net="plain", rate=r)
        )
    same, better = [cost[r].high < 2 for r in rates], [benefit[r].low > 0 for r in rates]
    moved = [shift[r].low > 0 for r in rates]
    checks = [a and b and c for a, b, c in zip(same, better, moved, strict=True)]
    accuracies = {n: t_interval(values(rows, "accuracy", net=n)) for n in NETS}
    shown = "; ".join(f"at {r:g}: noise costs {cost[r]} points, BatchNorm with noise gains {benefit[r]} on none, its "
                      f"input drifts {shift[r]} more" for r in rates)  # fmt: skip
    return Verdict(
        graded(checks),
        f"by learning rate, {shown}",
        numbers(
            **{f"cost_{r:g}": cost[r] for r in rates},
            **{f"benefit_{r:g}": benefit[r] for r in rates},
            **{n.replace(" ", "_"): i for n, i in accuracies.items()},
        ),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Accuracy against learning rate."""
    lines(axes, rows, "rate", "accuracy", "net", log="x")


CLAIM = Claim(
    id="santurkar-noise",
    kind="measured",
    statement="Noise after BatchNorm that raises the covariate shift does not hurt, so that shift is not the reason "
    "why BatchNorm helps.",
    source="Santurkar et al. 2018, arXiv:1805.11604, and tutorials",
    criterion="at every learning rate the noise costs less than 2 points of test accuracy (upper end of the 95 % "
    "t-interval over seeds), BatchNorm with noise is better than no norm (lower end above 0), and its hidden input "
    "drifts more from step to step than without norm; within limits if at some rates only",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
