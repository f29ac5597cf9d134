"""How far one step of the optimizer moves the output, against depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, numbers
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.single import single_data, single_logits, single_model
from normkit.lab.setups.statistics import log_slope, over_seeds, select, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLACEMENTS = ("post", "pre", "deepnorm")


def cells(quick: bool) -> list[Cell]:
    """Optimizers, placements and depths."""
    depths = (4, 8) if quick else (8, 16, 32, 64)
    return [
        {"optimizer": o, "placement": p, "depth": n, "dim": 32 if quick else 64}
        for o in ("adam", "sgd")
        for p in PLACEMENTS
        for n in depths
    ]


def measure(seed: int, optimizer: str, placement: str, depth: int, dim: int) -> dict[str, Any]:
    """The change of the logits in one step of the branches with a rate of 1e-5: small enough to be linear in it."""
    with seeded(seed):
        model = single_model(placement, depth, dim).double()
        tokens, targets = single_data()
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    step = kinds[optimizer](model.stack.parameters(), lr=1e-5)
    before = single_logits(model, tokens)
    cross_entropy(before, targets[:, 0]).backward()
    step.step()
    with torch.no_grad():
        return {"update": (single_logits(model, tokens) - before).norm().item()}


def exponent(rows: list[Row]) -> float:
    """The slope of log update in log depth, of one seed's rows."""
    return log_slope([r.cell["depth"] for r in rows], [r.result["update"] for r in rows]).mean


def judge(rows: list[Row]) -> Verdict:
    """See ``CRITERION``."""
    kinds = settings(rows, "optimizer")
    deepest = max(settings(rows, "depth"))
    slopes = {(o, p): over_seeds(select(rows, optimizer=o, placement=p), exponent) for o in kinds for p in PLACEMENTS}
    ratio = {
        o: over_seeds(select(rows, optimizer=o, depth=deepest), lambda found: _ratio(found)) for o in kinds
    }  # post over DeepNorm
    bounded = [slopes[o, "deepnorm"].high < 0.1 for o in kinds]
    smaller = [slopes[o, "deepnorm"].high < slopes[o, "post"].low and ratio[o].low > 1 for o in kinds]
    outcome = "holds" if all(bounded) and all(smaller) else "holds within limits" if any(smaller) else NOT_SEEN
    shown = "; ".join(
        f"{o}: post {slopes[o, 'post']}, pre {slopes[o, 'pre']}, DeepNorm {slopes[o, 'deepnorm']}, and at {deepest} "
        f"layers Post-LN moves {ratio[o]} times as far as DeepNorm"
        for o in kinds
    )
    return Verdict(
        outcome,
        f"exponents of the update in depth, {shown}",
        numbers(**{f"{o}_{p}": i for (o, p), i in slopes.items()}, **{f"{o}_ratio": i for o, i in ratio.items()}),
    )


def _ratio(rows: list[Row]) -> float:
    found = {r.cell["placement"]: r.result["update"] for r in rows}
    return found["post"] / found["deepnorm"]


def plot(rows: list[Row], axes: Axes) -> None:
    """Update against depth with Adam."""
    lines(axes, rows, "depth", "update", "placement", log="xy", optimizer="adam")


CLAIM = Claim(
    id="update-size",
    kind="measured",
    statement="DeepNorm bounds the change of the model's output per update.",
    source="Wang et al. 2022, arXiv:2203.00555",
    criterion="in the linear regime the exponent of the output's change in depth is below 0.1 with DeepNorm (upper end "
    "of the 95 % t-interval over seeds) and below Post-LN's, with Adam and with SGD; within limits if it grows slower "
    "than Post-LN's and is smaller at the largest depth, with one of them at least",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
