"""Whether a gain can make up for the mean that RMSNorm does not subtract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import holds_if, least, lines, randn
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MADE_UP = 0.01
"""A gain that leaves less than this share of LayerNorm's output unexplained has made up for the mean."""


def cells(quick: bool) -> list[Cell]:
    return [{"shift": s, "features": 64} for s in (0.25, 0.5, 1.0, 3.0)]


def measure(*, seed: int, shift: float, features: int) -> dict[str, Any]:
    rows = 4096
    means = shift * randn(rows, 1, seed=seed + 1)  # every row has its own
    x = randn(rows, features, seed=seed) + means
    bare = NormSpec(eps=0.0, has_weight=False)
    wanted, got = norm(x, bare), norm(x, bare.replace(centered=False))
    gain = (wanted * got).sum(0) / got.square().sum(0)  # the least-squares gain of each feature
    best = got * gain
    return {
        "unexplained": ((best - wanted).square().mean() / wanted.square().mean()).sqrt().item(),
        "row_mean": best.mean(-1).square().mean().sqrt().item(),
        "row_mean_layer": wanted.mean(-1).square().mean().sqrt().item(),
    }


def judge(rows: list[Row]) -> Verdict:
    left = {row.cell["shift"]: row.result["unexplained"] for row in rows}
    one = [row for row in rows if row.cell["shift"] == 1.0]
    mean = least(one, "row_mean")
    return holds_if(
        max(left.values()) <= MADE_UP,
        f"the best gain leaves {least(one, 'unexplained'):.0%} of LayerNorm's output unexplained where row means are "
        f"as large as the spread, and row means of {mean:.2g} where LayerNorm has 0; a gain scales and cannot shift",
        **{f"unexplained at mean {s:g} std": v for s, v in left.items()},
        **{"row mean left at mean 1 std": mean},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    own = [row for row in rows if row.seed == 0]
    lines(
        axes,
        [row.cell["shift"] for row in own],
        {
            "share of LayerNorm's output unexplained": [row.result["unexplained"] for row in own],
            "row mean left": [row.result["row_mean"] for row in own],
        },
        xlabel="spread of row means, in std",
        ylabel="RMS",
    )


CLAIM = Claim(
    id="gain-cannot-shift",
    kind="exact",
    statement="RMSNorm's learned gain can make up for the missing mean subtraction.",
    source="a tutorial's explanation",
    criterion=f"The gain that fits LayerNorm's output best (least squares, each feature) leaves at most {MADE_UP:.0%} "
    "of it unexplained on rows with means of their own.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
