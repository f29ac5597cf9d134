"""(x − mean) / (std + eps) with the unbiased std, beside nn.LayerNorm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import error, holds_if, least, lines, randn, worst
from normkit.spec import ANNOTATED_LAYER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDING = 1e-6
"""What float32 alone would change."""


def cells(quick: bool) -> list[Cell]:
    return [{"features": n, "std": s} for s in (1.0, 1e-2) for n in (2, 4, 16, 64, 512, 4096)]


def measure(*, seed: int, features: int, std: float) -> dict[str, Any]:
    x = randn(16, features, seed=seed) * std
    bare = ANNOTATED_LAYER.replace(has_weight=False, has_bias=False)
    annotated, layer = norm(x, bare), torch.nn.functional.layer_norm(x, (features,), eps=1e-5)
    without_eps = norm(x, bare.replace(eps=0.0)), torch.nn.functional.layer_norm(x, (features,), eps=0.0)
    return {
        "difference": error(annotated, layer),
        "factor_error": error(without_eps[0], without_eps[1] * math.sqrt((features - 1) / features)),
    }


def judge(rows: list[Row]) -> Verdict:
    apart, factor = least(rows, "difference"), worst(rows, "factor_error")
    small = worst([row for row in rows if row.cell["features"] == 4 and row.cell["std"] == 1], "difference")
    large = worst([row for row in rows if row.cell["features"] == 512 and row.cell["std"] == 1], "difference")
    return holds_if(
        apart > ROUNDING and factor <= 1e-9,
        f"without eps the outputs differ by exactly √((n − 1)/n) (to {factor:.1e}): {small:.1%} at n = 4 and "
        f"{large:.2%} at n = 512; with each form's own eps never by less than {apart:.1e}",
        **{"at n = 4": small, "at n = 512": large, "least difference": apart, "error of the factor": factor},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    first = [row for row in rows if row.seed == 0]
    n = [row.cell["features"] for row in first if row.cell["std"] == 1.0]
    series = {f"std {s:g}": [r.result["difference"] for r in first if r.cell["std"] == s] for s in (1.0, 1e-2)}
    series["1 − √((n − 1)/n)"] = [1 - math.sqrt((k - 1) / k) for k in n]
    lines(axes, n, series, xlabel="features n", ylabel="relative difference", log="xy")


CLAIM = Claim(
    id="std-outside",
    kind="exact",
    statement="(x − mean)/(std + eps) with the unbiased std, the Annotated Transformer's form, is not nn.LayerNorm.",
    source="a tutorial prints this form as LayerNorm; Ba et al. 2016, arXiv:1607.06450 divides by the biased std",
    criterion=f"In float64 its output differs from nn.LayerNorm's by more than float32 rounding ({ROUNDING:g}) at "
    "every width, and without eps by the factor √((n − 1)/n).",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
