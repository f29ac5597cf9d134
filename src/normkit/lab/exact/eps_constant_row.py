"""A row of equal values, with and without eps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import table
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    return [
        {"value": v, "features": n} for v, n in ((1.0, 4), (0.0, 4), (3.0, 100), (0.1, 10), (0.1, 100), (0.7, 1000))
    ]


def measure(*, seed: int, value: float, features: int) -> dict[str, Any]:
    x = torch.full((features,), value)
    centred = x - x.mean()
    variance = centred.square().mean()
    bare, kept = centred / variance.sqrt(), centred / (variance + 1e-6).sqrt()
    exact = norm(x, NormSpec(eps=1e-6, has_weight=False))
    return {
        "nan_without": bool(bare.isnan().all()),
        "without": bare.abs().max().item(),
        "with": kept.abs().max().item(),
        "normkit": exact.abs().max().item(),
        "mean_error": (x.mean().double() - x[0].double()).item(),
    }


def judge(rows: list[Row]) -> Verdict:
    nan = [row for row in rows if row.result["nan_without"]]
    rounded = [row for row in rows if row.result["mean_error"] != 0]
    kept = max(row.result["with"] for row in rows)
    numbers: dict[str, float | str] = {
        "rows that are NaN without eps": f"{len(nan)} of {len(rows)}",
        "rows whose float32 mean is not their value": len(rounded),
        "largest output with eps": kept,
    }
    finite = [row for row in rows if not row.result["nan_without"]]
    if not nan or kept > 1e-3:
        return Verdict("wrong as stated", f"{len(nan)} rows are NaN without eps, {kept:.1e} is left with it", numbers)
    if not finite and kept == 0:
        return Verdict("holds", f"all {len(rows)} constant rows are NaN without eps and 0 with it", numbers)
    example = max(finite or rows, key=lambda row: 0.0 if math.isnan(row.result["without"]) else row.result["without"])
    because = (
        f"where the computed mean is exactly the value: {len(nan)} of {len(rows)} rows are NaN without eps. Of "
        f"{example.cell['features']} values {example.cell['value']:g} the float32 mean is off by "
        f"{abs(example.result['mean_error']):.1e}, and without eps that rounding error is blown up to "
        f"{example.result['without']:.3g}; with eps at most {kept:.1e} is left"
    )
    return Verdict("holds within limits", because, numbers)


def plot(rows: list[Row], axes: Axes) -> None:
    lines = [
        (
            f"{row.cell['features']} × {row.cell['value']:g}",
            "NaN" if row.result["nan_without"] else f"{row.result['without']:.3g}",
            f"{row.result['with']:.2g}",
            f"{row.result['normkit']:.2g}",
        )
        for row in rows
    ]
    table(axes, ("row", "without eps", "eps = 1e-6", "normkit, eps = 1e-6"), lines)


CLAIM = Claim(
    id="eps-constant-row",
    kind="exact",
    statement="A constant row is NaN without eps, and 0 with it.",
    source="a tutorial's exercise",
    criterion="Plain float32 LayerNorm of six constant rows: all NaN without eps and all exactly 0 with it (holds); "
    "within limits if only those are whose float32 mean is exact, and eps leaves under 1e-3.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
