"""A GRU with LayerNorm, with RMSNorm and without norm: accuracy, and what RMSNorm saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.blocks import IMPLEMENTATIONS, block_stack, training_step
from normkit.lab.setups.digits import batches, digits
from normkit.lab.setups.judging import best, gain, graded, numbers
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.recurrent import Reader
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select
from normkit.lab.setups.timing import median_times
from normkit.lab.setups.training import accuracy, classification, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NETS = ("none", "layer", "rms")


def cells(quick: bool) -> list[Cell]:
    """Nets by learning rate, and the time of a training step of a GRU and of a Transformer."""
    rates, epochs, steps = ((1e-2,), 1, 4) if quick else ((3e-3, 1e-2), 4, 16)
    trained = [{"part": "quality", "net": n, "rate": r, "epochs": epochs, "steps": steps} for n in NETS for r in rates]
    rounds = 3 if quick else 21
    return trained + [{"part": "time", "net": n, "rounds": rounds} for n in ("gru", "transformer")]


def measure(seed: int, part: str, net: str, **options: Any) -> dict[str, Any]:
    """The test error in per cent, or the share of LayerNorm's time that RMSNorm saves."""
    with seeded(seed):
        return time_saved(net, **options) if part == "time" else trained(net, **options)


def trained(net: str, rate: float, epochs: int, steps: int) -> dict[str, Any]:
    """The test error after training by Adam."""
    data = digits()
    model = Reader(net, steps=steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    train(classification(model, batches(data.train_x, data.train_y, 64, epochs)), optimizer, clip=1.0)
    return {"error": 100 * (1 - accuracy(model, data.test_x, data.test_y))}


def time_saved(net: str, rounds: int) -> dict[str, Any]:
    """1 - RMSNorm's time over LayerNorm's, of one training step."""
    if net == "gru":
        x = torch.randn(64, 64)
        calls = {n: training_step(Reader(n, steps=16), x) for n in ("layer", "rms")}
    else:
        x = torch.randn(4, 32, 128)
        calls = {
            n: training_step(block_stack(IMPLEMENTATIONS["normkit"][n], depth=2, dim=128), x) for n in ("layer", "rms")
        }
    times = median_times(calls, rounds=rounds)
    return {"saved": 1 - times["rms"] / times["layer"]}


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    quality = select(rows, part="quality")
    at = {n: {"net": n, "rate": best(quality, "error", "rate", net=n)} for n in NETS}
    helps = gain(quality, "error", better=at["layer"], than=at["none"])
    rms = gain(quality, "error", better=at["rms"], than=at["none"])
    saved = {
        n: over_seeds(select(rows, part="time", net=n), lambda own: own[0].result["saved"])
        for n in ("gru", "transformer")
    }

    def more(own: list[Row]) -> float:
        found = {r.cell["net"]: r.result["saved"] for r in own}
        return found["gru"] - found["transformer"]

    most = over_seeds(select(rows, part="time"), more)
    return Verdict(
        graded((helps.low > 0, most.low > 0 and saved["gru"].low > 0)),
        f"each at its best rate, LayerNorm lowers the GRU's test error by {helps} points and RMSNorm by {rms}; RMSNorm "
        f"saves {saved['gru']} of a GRU's training step and {saved['transformer']} of a Transformer's",
        numbers(layer=helps, rms=rms, saved_gru=saved["gru"], saved_transformer=saved["transformer"]),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Error against learning rate."""
    quality = select(rows, part="quality")
    lines(axes, quality, "rate", "error", "net", log="x")


CLAIM = Claim(
    id="recurrent-layernorm",
    kind="measured",
    statement="LayerNorm helps recurrent networks, and it is there that RMSNorm saves the most time.",
    source="Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467; a tutorial",
    criterion="each at its best learning rate, the GRU's test error is lower with LayerNorm than without norm, and the "
    "share of LayerNorm's time that RMSNorm saves is above 0 and larger than in a Transformer (95 % t-intervals over "
    "seeds, paired); within limits if one of the two",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
