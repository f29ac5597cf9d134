"""Time of RMSNorm against LayerNorm: the norm alone and a whole training step, in several implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.blocks import IMPLEMENTATIONS, block_stack, training_step
from normkit.lab.setups.judging import NOT_SEEN, numbers
from normkit.lab.setups.plotting import bars
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select
from normkit.lab.setups.timing import median_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SENTENCES = {
    "about 50 % less computation": ("norm", 0.40, 0.60),
    "7 to 15 % of the norm's time": ("norm", 0.07, 0.15),
    "7 to 9 % of a Transformer's running time": ("step", 0.07, 0.09),
    "training 10 to 20 % faster": ("step", 0.10, 0.20),
}
"""Each sentence: what it is about, and the share of time between which the saving must lie."""
PARTS = ("norm", "norm_with_backward", "step")


def cells(quick: bool) -> list[Cell]:
    """Implementations; "compiled" is what is written out, through torch.compile."""
    names = ("written out", "torch", "normkit") if quick else ("written out", "compiled", "torch", "normkit")
    size = {"tokens": 32, "dim": 64, "rounds": 3} if quick else {"tokens": 256, "dim": 256, "rounds": 15}
    return [{"implementation": n, **size} for n in names]


def measure(seed: int, implementation: str, tokens: int, dim: int, rounds: int) -> dict[str, Any]:
    """The shares of LayerNorm's time that RMSNorm saves."""
    compiled = implementation == "compiled"
    made = IMPLEMENTATIONS["written out" if compiled else implementation]
    found = {}
    with seeded(seed):
        x, stream = torch.randn(tokens, dim), torch.randn(tokens // 32, 32, dim)

        def prepare(module: torch.nn.Module) -> Any:
            return torch.compile(module) if compiled else module

        modules = {name: prepare(make(dim)) for name, make in made.items()}
        steps = {n: training_step(prepare(block_stack(make, depth=2, dim=dim)), stream) for n, make in made.items()}

    def forward(name: str) -> None:
        with torch.no_grad():
            modules[name](x)

    leaf = x.clone().requires_grad_()

    def backward(name: str) -> None:
        modules[name](leaf).sum().backward()

    calls = {
        "norm": {n: lambda n=n: forward(n) for n in made},
        "norm_with_backward": {n: lambda n=n: backward(n) for n in made},
        "step": steps,
    }
    for part, pair in calls.items():
        times = median_times(pair, rounds=rounds)
        found[part] = 1 - times["rms"] / times["layer"]
        found[f"{part}_microseconds"] = 1e6 * times["layer"]
    return found


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    names = list(dict.fromkeys(r.cell["implementation"] for r in rows))
    saved = {
        (i, p): over_seeds(select(rows, implementation=i), lambda own, p=p: own[0].result[p])
        for i in names
        for p in PARTS
    }
    survives = {
        sentence: [i for i in names if low <= saved[i, part].mean <= high and saved[i, part].low > 0]
        for sentence, (part, low, high) in SENTENCES.items()
    }
    faster = [saved[i, p].low > 0 for i in names for p in ("norm", "step")]
    outcome = "holds within limits" if any(faster) else NOT_SEEN
    told = "; ".join(f"“{s}”: {', '.join(found) or 'in none'}" for s, found in survives.items())
    shown = "; ".join(f"{i}: norm {saved[i, 'norm']}, with backward {saved[i, 'norm_with_backward']}, training step "
                      f"{saved[i, 'step']}" for i in names)  # fmt: skip
    return Verdict(
        outcome,
        f"share of LayerNorm's time that RMSNorm saves, {shown}; sentences that survive: {told}",
        numbers(**{f"{i.replace(' ', '_')}_{p}": v for (i, p), v in saved.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Savings by implementation."""
    bars(axes, rows, "implementation", *PARTS, unit="share of time saved")


CLAIM = Claim(
    id="rms-speed",
    kind="measured",
    statement="RMSNorm is faster than LayerNorm: by about 50 % of the computation; by 7 to 15 % of the norm's time; by "
    "7 to 9 % of a Transformer's running time (7 to 64 % over models); training is 10 to 20 % faster.",
    source="sources disagree: tutorials' statements; Zhang and Sennrich 2019, arXiv:1910.07467",
    criterion="a sentence survives in an implementation if the share of time saved (interleaved rounds in one process, "
    "mean over seeds) lies in its range and its 95 % t-interval above 0; as the sentences exclude one another, they "
    "cannot all hold: within limits if RMSNorm is at least somewhere clearly faster",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
