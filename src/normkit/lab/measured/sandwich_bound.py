"""What a branch writes onto the stream when its weights are large."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, WRONG, graded, numbers
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.single import single_data, single_model, stream_states
from normkit.lab.setups.statistics import over_seeds, select, settings, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLACEMENTS = ("pre", "sandwich", "output")


def cells(quick: bool) -> list[Cell]:
    """Placements by the factor on one layer's matrices that write onto the stream."""
    return [
        {"placement": p, "factor": f}
        for p in PLACEMENTS
        for f in ((1.0, 100.0) if quick else (1.0, 10.0, 100.0, 1000.0))
    ]


@torch.no_grad()
def measure(seed: int, placement: str, factor: float) -> dict[str, Any]:
    """The RMS of what the middle layer's feed-forward branch writes, its gains being as after training."""
    written = []
    with seeded(seed):
        model = single_model(placement, 4)
        for name, parameter in model.named_parameters():
            if name.endswith("_norm.weight"):
                parameter.copy_(0.5 + torch.rand_like(parameter))
        branch = model.stack.layers[1].ffn
        branch.sublayer.down.weight.mul_(factor)
        last = branch.sublayer if branch.output_norm is None else branch.output_norm
        last.register_forward_hook(lambda module, args, out: written.append(out))
        stream_states(model, single_data()[0])
    bound = 0.0 if branch.output_norm is None else branch.output_norm.weight.abs().max().item()
    return {"written": written[0].pow(2).mean(-1).sqrt().max().item(), "largest_gain": bound}


def growth(rows: list[Row]) -> float:
    """The write at the largest factor over that at the smallest, of one seed's rows."""
    found = sorted((r.cell["factor"], r.result["written"]) for r in rows)
    return found[-1][1] / found[0][1]


def judge(rows: list[Row]) -> Verdict:
    """See ``CRITERION``."""
    factor = max(settings(rows, "factor")) / min(settings(rows, "factor"))
    grown = {p: over_seeds(select(rows, placement=p), growth) for p in PLACEMENTS}
    normed = PLACEMENTS[1:]
    kept = [
        grown[p].high < 1.1
        and all(
            w <= g
            for w, g in zip(
                values(rows, "written", placement=p), values(rows, "largest_gain", placement=p), strict=True
            )
        )
        for p in normed
    ]
    outcome = graded(kept, WRONG) if grown["pre"].low > factor / 2 else NOT_SEEN
    shown = ", ".join(f"{grown[p]} times with {p}" for p in PLACEMENTS)
    return Verdict(
        outcome,
        f"when a branch's last matrix grows {factor:g} times, what it writes grows {shown}",
        numbers(**grown),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Write against the factor."""
    lines(axes, rows, "factor", "written", "placement", log="xy")


CLAIM = Claim(
    id="sandwich-bound",
    kind="measured",
    statement="Sandwich and output norms bound what each branch writes onto the stream.",
    source="a tutorial's statement; Ding et al. 2021, arXiv:2105.13290",
    criterion="with sandwich and output norms the RMS of a branch's write never passes the largest gain and grows less "
    "than 1.1 times (upper end of the 95 % t-interval over seeds) when the branch's last matrix is multiplied, while "
    "Pre-LN's grows by more than half the factor; within limits if for one of the two",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
