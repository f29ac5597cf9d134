"""How much the result depends on the scale of the initialization: LayerNorm, and Post-LN against Pre-LN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.digits import batches, digits
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.language import language_model, train_language
from normkit.lab.setups.mlp import mlp
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import Interval, over_seeds, select
from normkit.lab.setups.training import accuracy, classification, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MLPS = {"MLP without norm": "none", "MLP with LayerNorm": "layer"}
TRANSFORMERS = {"Pre-LN": "pre", "Post-LN": "post"}


def cells(quick: bool) -> list[Cell]:
    """Models by the factor on their initial weights."""
    scales = (0.25, 4.0) if quick else (0.25, 0.5, 1.0, 2.0, 4.0)
    return [
        {"model": m, "scale": s, "depth": 2 if quick else 6, "steps": 6 if quick else 150}
        for m in (*MLPS, *TRANSFORMERS)
        for s in scales
    ]


def digits_result(norm: Any, scale: float, depth: int, steps: int) -> float:
    """The test error as a share, after a few epochs on the digits."""
    data = digits()
    model = mlp(norm, depth=depth)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.out_features != 10:
                nn.init.kaiming_normal_(module.weight).mul_(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(classification(model, batches(data.train_x, data.train_y, 64, max(1, steps // 21))), optimizer)
    return 1 - accuracy(model, data.test_x, data.test_y)


def text_result(placement: str, scale: float, depth: int, steps: int) -> float:
    """The validation loss in nats; Xavier's deviation at width 32 times the scale on every matrix of the branches."""
    model = language_model(placement=placement, depth=depth, ffn_dim=32, base=scale * 32**-0.5)
    return train_language(model, steps=steps, rate=2e-3, warm_up=steps // 5).validation


def measure(seed: int, model: str, scale: float, depth: int, steps: int) -> dict[str, Any]:
    """The test error of a multilayer perceptron, or the validation loss of a Transformer."""
    with seeded(seed):
        if model in MLPS:
            return {"result": digits_result(MLPS[model], scale, depth, steps)}
        return {"result": text_result(TRANSFORMERS[model], scale, depth, steps)}


def spread(rows: list[Row]) -> float:
    """The worst result over scales less the best, of one seed's rows."""
    found = [r.result["result"] for r in rows]
    return max(found) - min(found)


def compare(rows: list[Row], wide: str, narrow: str) -> Interval:
    """How much wider one model's spread is than another's."""
    return over_seeds(rows, lambda own: spread(select(own, model=wide)) - spread(select(own, model=narrow)))


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    own = {m: over_seeds(select(rows, model=m), spread) for m in (*MLPS, *TRANSFORMERS)}
    lowers, raises = compare(rows, *MLPS), compare(rows, "Post-LN", "Pre-LN")
    return Verdict(
        graded((lowers.low > 0, raises.low > 0)),
        f"over a {_range(rows):g}-fold range of scales the test error spreads by {own['MLP without norm']} without norm "
        f"and {own['MLP with LayerNorm']} with LayerNorm (difference {lowers}); the Transformer's loss by "
        f"{own['Post-LN']} nats in Post-LN and {own['Pre-LN']} in Pre-LN (difference {raises})",
        numbers(norm_lowers=lowers, post_raises=raises),
    )


def _range(rows: list[Row]) -> float:
    scales = [r.cell["scale"] for r in rows]
    return max(scales) / min(scales)


def plot(rows: list[Row], axes: Axes) -> None:
    """Result against scale."""
    lines(axes, rows, "scale", "result", "model", log="x")
    axes.set_ylabel("test error (MLP), loss in nats (Transformer)")


CLAIM = Claim(
    id="norm-init-sensitivity",
    kind="measured",
    statement="LayerNorm lowers the dependence on initialization; Post-Norm raises it.",
    source="tutorials' statements",
    criterion="over a range of scales of the initial weights the result's spread (worst less best) is smaller with "
    "LayerNorm than without norm in a multilayer perceptron, and larger for Post-LN than for Pre-LN in a Transformer "
    "(95 % t-intervals over seeds of the difference); within limits if one of the two",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
