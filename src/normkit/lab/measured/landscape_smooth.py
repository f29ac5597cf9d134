"""The loss along the gradient with BatchNorm and without, at the same loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.digits import batches, digits
from normkit.lab.setups.judging import NOT_SEEN, WRONG, graded, numbers
from normkit.lab.setups.mlp import mlp
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select, settings
from normkit.lab.setups.training import diverged, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = ("loss_range", "gradient_change", "effective_beta")
STEPS = (0.5, 1.0, 2.0, 4.0)
BINS = (2.2, 1.6, 1.1, 0.8, 0.55, 0.4, 0.28, 0.2, 0.14, 0.1)
"""Edges of loss between which the two nets are compared: a net that does not train is trivially flat."""


def cells(quick: bool) -> list[Cell]:
    """Nets by learning rate."""
    rates, epochs, every = ((0.1,), 2, 10) if quick else ((0.05, 0.1, 0.2), 12, 6)
    return [{"norm": n, "rate": r, "epochs": epochs, "every": every} for n in ("none", "batch") for r in rates]


def look_ahead(model: nn.Module, x: Tensor, y: Tensor, rate: float) -> dict[str, float]:
    """The three measures along the gradient of one batch, over steps of half to four times the rate."""
    parameters = list(model.parameters())

    def loss_and_gradient() -> tuple[float, Tensor]:
        loss = cross_entropy(model(x), y)
        return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    here, gradient = loss_and_gradient()
    start = nn.utils.parameters_to_vector(parameters).detach()
    losses, changes, betas = [here], [], []
    for factor in STEPS:
        nn.utils.vector_to_parameters(start - factor * rate * gradient, parameters)
        there, other = loss_and_gradient()
        change = (other - gradient).norm().item()
        losses.append(there)
        changes.append(change)
        betas.append(change / (factor * rate * gradient.norm().item()))
    nn.utils.vector_to_parameters(start, parameters)
    return {
        "loss": here,
        "loss_range": max(losses) - min(losses),
        "gradient_change": max(changes),
        "effective_beta": max(betas),
    }


def measure(seed: int, norm: Any, rate: float, epochs: int, every: int) -> dict[str, Any]:
    """The mean logarithm of each measure for each bin of loss, along a run of SGD."""
    with seeded(seed):
        data = digits(0.3)
        model = mlp(norm)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        pairs = list(batches(data.train_x, data.train_y, 64, epochs))
    found: list[dict[str, float]] = []

    def look(step: int) -> None:
        if step % every == 0 and step + 1 < len(pairs):
            found.append(look_ahead(model, *pairs[step + 1], rate))

    losses = train(
        (lambda x=x, y=y: cross_entropy(model(x), y) for x, y in pairs),
        torch.optim.SGD(model.parameters(), lr=rate),
        after=look,
    )
    binned: dict[str, list[float | None]] = {name: [] for name in MEASURES}
    for high, low in zip(BINS, BINS[1:], strict=False):
        own = [f for f in found if low <= f["loss"] < high]
        for name in MEASURES:
            logs = [math.log(f[name]) for f in own if f[name] > 0 and math.isfinite(f[name])]
            binned[name].append(sum(logs) / len(logs) if logs else None)
    return {**binned, "diverged": diverged(losses)}


def log_ratio(rows: list[Row], name: str) -> float:
    """The mean over shared bins of log (without norm / with BatchNorm), of one seed's two rows; NaN without any."""
    found = {r.cell["norm"]: r.result[name] for r in rows}
    shared = [a - b for a, b in zip(found["none"], found["batch"], strict=True) if a is not None and b is not None]
    return sum(shared) / len(shared) if shared else math.nan


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    found = {
        (r, n): over_seeds(select(rows, rate=r), lambda own, n=n: log_ratio(own, n))
        for r in settings(rows, "rate")
        for n in MEASURES
    }
    smoother, rougher = [i.low > 0 for i in found.values()], [i.high < 0 for i in found.values()]
    shown = "; ".join(f"{n.replace('_', ' ')} at {r:g}: {math.exp(i.mean):.3g} [{math.exp(i.low):.3g}, "
                      f"{math.exp(i.high):.3g}]" for (r, n), i in found.items())  # fmt: skip
    return Verdict(
        graded(smoother, WRONG if all(rougher) else NOT_SEEN),
        f"the net without norm over the one with BatchNorm, at the same loss: {shown}",
        numbers(**{f"log_{n}_{r:g}": i for (r, n), i in found.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Effective beta against loss at the middle rate."""
    rates = settings(rows, "rate")
    for n, name in enumerate(settings(rows, "norm")):
        for row in select(rows, norm=name, rate=rates[len(rates) // 2]):
            at = [(a * b) ** 0.5 for a, b in zip(BINS, BINS[1:], strict=False)]
            points = [(x, math.exp(v)) for x, v in zip(at, row.result["effective_beta"], strict=True) if v is not None]
            if points:
                axes.plot(*zip(*points, strict=True), f"C{n}o-", label=name if row.seed == 0 else None)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("loss")
    axes.set_ylabel("effective β")
    axes.legend()


CLAIM = Claim(
    id="landscape-smooth",
    kind="measured",
    statement="BatchNorm smooths the loss: along the gradient the loss varies less, and the gradient changes less.",
    source="Santurkar et al. 2018, arXiv:1805.11604, and tutorials",
    criterion="at each learning rate, and at matched loss, the range of the loss, the change of the gradient and the "
    "effective β over steps of 1/2 to 4 times the rate are larger without norm than with BatchNorm (95 % t-interval "
    "over seeds of the ratio's logarithm); within limits if some are; wrong as stated if all are smaller",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
