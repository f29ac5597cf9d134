"""The norms' share of a training step's time against their share of its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.blocks import IMPLEMENTATIONS, block_stack, training_step
from normkit.lab.setups.judging import NOT_SEEN, numbers
from normkit.lab.setups.plotting import bars
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select, settings
from normkit.lab.setups.timing import median_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPERATIONS = 8 + 14
"""Of one element in LayerNorm, forward (mean, difference, square, sum, scale, gain, bias) and backward."""


def cells(quick: bool) -> list[Cell]:
    """Implementations of LayerNorm."""
    size = {"dim": 32, "tokens": 64, "rounds": 3} if quick else {"dim": 256, "tokens": 256, "rounds": 15}
    return [{"implementation": n, **size} for n in IMPLEMENTATIONS]


def measure(seed: int, implementation: str, dim: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The share of time is what the same step without norms saves."""
    depth = 2
    with seeded(seed):
        x = torch.randn(tokens // 32, 32, dim)
        made = {"with": IMPLEMENTATIONS[implementation]["layer"], "without": None}
        models = {name: block_stack(make, depth=depth, dim=dim) for name, make in made.items()}
    times = median_times({name: training_step(model, x) for name, model in models.items()}, rounds=rounds)
    with FlopCounterMode(display=False) as counter:
        training_step(models["without"], x)()
    flops = OPERATIONS * x.numel() * (2 * depth + 1)
    return {
        "time_share": 1 - times["without"] / times["with"],
        "operation_share": flops / (flops + counter.get_total_flops()),
    }


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    names = settings(rows, "implementation")

    def share(name: str, part: str):
        return over_seeds(select(rows, implementation=name), lambda own: own[0].result[part])

    def excess(own: list[Row]) -> float:
        return own[0].result["time_share"] - 3 * own[0].result["operation_share"]

    time = {n: share(n, "time_share") for n in names}
    operations = {n: share(n, "operation_share") for n in names}
    beyond = {n: over_seeds(select(rows, implementation=n), excess) for n in names}
    far = [i.low > 0 for i in beyond.values()]
    outcome = "holds" if all(far) else "holds within limits" if any(far) else NOT_SEEN
    shown = "; ".join(f"{n}: {time[n]} of the time, {operations[n].mean:.3g} of the operations" for n in names)
    return Verdict(
        outcome,
        f"the norms of a training step take, {shown}",
        numbers(**{f"time_{n.replace(' ', '_')}": i for n, i in time.items()})
        | {"operations": operations[names[0]].mean},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Both shares by implementation."""
    bars(axes, rows, "implementation", "time_share", "operation_share")


CLAIM = Claim(
    id="time-against-flops",
    kind="measured",
    statement="Norms take a far larger share of a training step's time than of its operations.",
    source="a tutorial's statement",
    criterion="the norms' share of the time (what the same step without norms saves, interleaved rounds) is more than 3 "
    "times their share of the operations (lower end of the 95 % t-interval over seeds) in every implementation; within "
    "limits if in some",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
