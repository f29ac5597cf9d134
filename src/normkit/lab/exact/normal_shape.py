"""Whether normalization makes data normal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, holds_if, randn, worst
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NORMAL = 0.1
"""Skewness and excess kurtosis of 20 000 normal values stay under this (standard errors .017 and .035)."""


def _data(shape: str, seed: int) -> Tensor:
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if shape == "uniform":
        return uniform
    if shape == "exponential":
        return -torch.log1p(-uniform)
    if shape == "two peaks":
        return randn(20000, seed=seed) * 0.3 + (uniform > 0.5) * 4
    return randn(20000, seed=seed).exp()  # log-normal


def _moments(x: Tensor) -> dict[str, float]:
    centred = x - x.mean()
    std = centred.square().mean().sqrt()
    return {
        "mean": x.mean().item(),
        "std": std.item(),
        "skewness": (centred / std).pow(3).mean().item(),
        "kurtosis": (centred / std).pow(4).mean().item() - 3,
    }


def cells(quick: bool) -> list[Cell]:
    return [{"shape": s} for s in ("uniform", "exponential", "two peaks", "log-normal")]


def measure(*, seed: int, shape: str) -> dict[str, Any]:
    x = _data(shape, seed)
    y = norm(x, NormSpec(eps=0.0, has_weight=False))
    before, after = _moments(x), _moments(y)
    kept = max(abs(after[n] - before[n]) / max(1.0, abs(before[n])) for n in ("skewness", "kurtosis"))
    edges = torch.linspace(-3, 5, 41, dtype=x.dtype)
    return {"before": before, "after": after, "change": kept, "histogram": torch.histogram(y, edges)[0].tolist()}


def judge(rows: list[Row]) -> Verdict:
    apart = max(max(abs(r.result["after"]["skewness"]), abs(r.result["after"]["kurtosis"])) for r in rows)
    change = worst(rows, "change")
    first_two = max(max(abs(r.result["after"]["mean"]), abs(r.result["after"]["std"] - 1)) for r in rows)
    numbers: dict[str, float | str] = {
        f"skewness and excess kurtosis, {r.cell['shape']}": f"{r.result['after']['skewness']:.3g}, "
        f"{r.result['after']['kurtosis']:.3g}"
        for r in rows
        if r.seed == 0
    }
    return holds_if(
        apart <= NORMAL,
        f"mean and std become 0 and 1 (to {first_two:.0e}), but skewness and kurtosis change by at most {change:.0e}: "
        f"the shape stays, {apart:.3g} away from a normal one at worst"
        + ("" if change <= EXACT * 1e3 else "; they do change, so this is not a plain normalization"),
        **numbers,
    )


def plot(rows: list[Row], axes: Axes) -> None:
    edges = [-3 + 0.2 * n for n in range(41)]
    for row in rows:
        if row.seed == 0:
            axes.stairs([h / 20000 / 0.2 for h in row.result["histogram"]], edges, label=row.cell["shape"])
    grid = [-3 + 0.05 * n for n in range(161)]
    axes.plot(grid, [2.718281828 ** (-g * g / 2) / 2.506628275 for g in grid], "k--", linewidth=1, label="normal")
    axes.set_xlabel("normalized value")
    axes.set_ylabel("density")
    axes.legend()


CLAIM = Claim(
    id="normal-shape",
    kind="exact",
    statement="Normalization brings the data to a normal distribution.",
    source="a tutorial's statement",
    criterion=f"After normalization skewness and excess kurtosis of four shapes of data are within {NORMAL:g} of 0.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
