"""x = [1, 2, 3, 4] through LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import bars, holds_if
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATED = {
    "layer": [-1.3416, -0.4472, 0.4472, 1.3416],
    "rms": [0.3651, 0.7303, 1.0954, 1.4606],
    "root_mean_square": 2.7386,
    "layer_length": 2.0,
    "rms_length": 2.0,
}
HALF_DIGIT = 0.5e-4
"""Four digits after the point, rounded."""


def cells(quick: bool) -> list[Cell]:
    return [{"x": [1.0, 2.0, 3.0, 4.0]}]


def measure(*, seed: int, x: list[float]) -> dict[str, Any]:
    row = torch.tensor(x, dtype=torch.float64)
    bare = NormSpec(eps=0.0, has_weight=False)
    layer, rms = norm(row, bare), norm(row, bare.replace(centered=False))
    return {
        "layer": layer.tolist(),
        "rms": rms.tolist(),
        "root_mean_square": row.square().mean().sqrt().item(),
        "layer_length": layer.norm().item(),
        "rms_length": rms.norm().item(),
    }


def judge(rows: list[Row]) -> Verdict:
    (row,) = rows
    off = 0.0
    for name, stated in STATED.items():
        got = row.result[name]
        pairs = zip(got, stated, strict=True) if isinstance(stated, list) else [(got, stated)]
        off = max(off, *(abs(a - b) for a, b in pairs))
    return holds_if(
        off <= HALF_DIGIT,
        f"the largest difference from a stated number is {off:.2g}, where half a digit is {HALF_DIGIT:g}",
        **{"largest difference": off, "length of both": row.result["rms_length"]},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    (row,) = rows
    bars(
        axes,
        [f"$x_{n + 1}$ = {v:g}" for n, v in enumerate(row.cell["x"])],
        {"LayerNorm": row.result["layer"], "RMSNorm": row.result["rms"]},
        ylabel="output",
    )


CLAIM = Claim(
    id="worked-example",
    kind="exact",
    statement="Of x = [1, 2, 3, 4], LayerNorm makes [−1.3416, −0.4472, 0.4472, 1.3416] and RMSNorm, with an RMS of "
    "2.7386, makes [0.3651, 0.7303, 1.0954, 1.4606]; both have the L2 norm √d = 2.",
    source="a tutorial's worked example",
    criterion="Every stated number is right to its fourth digit (float64, no eps, no gain).",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
