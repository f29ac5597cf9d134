"""How the residual stream grows with depth at initialization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.single import single_data, single_model, stream_states
from normkit.lab.setups.statistics import over_seeds, r_squared, select

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    """Placements at one depth."""
    return [{"placement": p, "depth": 8 if quick else 32} for p in ("pre", "post")]


@torch.no_grad()
def measure(seed: int, placement: str, depth: int) -> dict[str, Any]:
    """The mean square of the stream behind each layer."""
    with seeded(seed):
        model = single_model(placement, depth)
        return {"sizes": [s.pow(2).mean().item() for s in stream_states(model, single_data()[0])]}


def judge(rows: list[Row]) -> Verdict:
    """See ``CRITERION``."""
    pre, post = select(rows, placement="pre"), select(rows, placement="post")

    def straight(found: list[Row]) -> float:
        sizes = found[0].result["sizes"]
        return r_squared(range(1, len(sizes) + 1), sizes)

    def growth(found: list[Row]) -> float:
        sizes = found[0].result["sizes"]
        return max(sizes) / min(sizes)

    line, pre_growth, post_growth = over_seeds(pre, straight), over_seeds(pre, growth), over_seeds(post, growth)
    outcome = graded((line.low > 0.98 and pre_growth.low > 4, post_growth.high < 1.05))
    return Verdict(
        outcome,
        f"Pre-LN's mean square grows {pre_growth} times over {pre[0].cell['depth']} layers, and a straight line explains "
        f"{line} of it; Post-LN's largest is {post_growth} times its smallest",
        numbers(r_squared=line, pre_growth=pre_growth, post_growth=post_growth),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Mean square of the stream by layer."""
    for n, name in enumerate(("pre", "post")):
        for row in select(rows, placement=name):
            sizes = row.result["sizes"]
            axes.plot(range(1, len(sizes) + 1), sizes, color=f"C{n}", label=name if row.seed == 0 else None)
    axes.set_xlabel("layer")
    axes.set_ylabel("mean square of the stream")
    axes.legend()


CLAIM = Claim(
    id="stream-growth",
    kind="measured",
    statement="Pre-LN's stream variance grows linearly in depth; Post-LN's does not.",
    source="Xiong et al. 2020, arXiv:2002.04745, and tutorials",
    criterion="for Pre-LN a straight line in the layer's number explains more than 0.98 of the mean square's variance "
    "(R²) and it grows more than 4 times, lower ends of the 95 % t-intervals over seeds; for Post-LN the largest is "
    "less than 1.05 times the smallest (upper end); within limits if one of the two",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
