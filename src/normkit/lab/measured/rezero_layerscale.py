"""A deep residual net without norms, and what ReZero and LayerScale make of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.digits import batches, digits
from normkit.lab.setups.judging import NOT_SEEN, graded, numbers
from normkit.lab.setups.mlp import residual_mlp
from normkit.lab.setups.plotting import bars
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import t_interval, values
from normkit.lab.setups.training import accuracy, classification, train
from normkit.placement import PLACEMENTS, Placement, placement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPAIRS = ("rezero", "layerscale")


def wiring(name: str, depth: int) -> str | Placement:
    """The placement of that name without its norms, where it has any: the claim is about nets that have none."""
    if name != "layerscale":
        return name
    return replace(placement(name, depth=depth), input_norm=False, final_norm=False)


def cells(quick: bool) -> list[Cell]:
    """No repair, and both."""
    return [{"net": n, "depth": 16 if quick else 64, "epochs": 1 if quick else 6} for n in ("none", *REPAIRS)]


def measure(seed: int, net: str, depth: int, epochs: int) -> dict[str, Any]:
    """The loss before training, and the test accuracy after it, in per cent."""
    assert net in PLACEMENTS
    with seeded(seed):
        data = digits()
        model = residual_mlp(wiring(net, depth), depth=depth)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        with torch.no_grad():
            first = cross_entropy(model(data.train_x), data.train_y).item()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        train(classification(model, batches(data.train_x, data.train_y, 64, epochs)), optimizer)
        reached = 100 * accuracy(model, data.test_x, data.test_y)
    return {"log10_first_loss": math.log10(first) if math.isfinite(first) else 300.0, "accuracy": reached}


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    first = {n: t_interval(values(rows, "log10_first_loss", net=n)) for n in ("none", *REPAIRS)}
    reached = {n: t_interval(values(rows, "accuracy", net=n)) for n in ("none", *REPAIRS)}
    repaired = [first[n].high < 1 and reached[n].low > 90 for n in REPAIRS]
    outcome = graded(repaired) if first["none"].low > 3 and reached["none"].high < 90 else NOT_SEEN
    shown = "; ".join(f"{n}: 10^{first[n]}, then {reached[n]} per cent" for n in ("none", *REPAIRS))
    return Verdict(
        outcome,
        f"initial loss, and test accuracy after training, of {rows[0].cell['depth']} branches: {shown}",
        numbers(
            **{f"log10_first_loss_{n}": i for n, i in first.items()}, **{f"accuracy_{n}": i for n, i in reached.items()}
        ),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Accuracy by net."""
    bars(axes, rows, "net", "accuracy", "log10_first_loss")


CLAIM = Claim(
    id="rezero-layerscale",
    kind="measured",
    statement="A deep residual net without norms explodes; ReZero and LayerScale repair it.",
    source="Bachlechner et al. 2020, arXiv:2003.04887; Touvron et al. 2021, arXiv:2103.17239",
    criterion="without repair the initial loss is above 1000 and the test accuracy after training below 90 %, with each "
    "of the two it is below 10 and above 90 % (ends of the 95 % t-intervals over seeds); within limits if one repairs it",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
