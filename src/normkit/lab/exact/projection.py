"""The geometry: LayerNorm projects and scales, RMSNorm only scales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, error, errors, holds_if, randn, worst
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {
    "projection": "LN = √d · Px / |Px|",
    "along_ones": "LN along the ones",
    "layer_radius": "|LN| = √d",
    "rms_radius": "|RMSNorm| = √d",
    "turned": "RMSNorm's turn, 1 − cos",
}


def cells(quick: bool) -> list[Cell]:
    return [{"features": d, "shift": m} for d in (3, 64, 1000) for m in (0.0, 3.0)]


def measure(*, seed: int, features: int, shift: float) -> dict[str, Any]:
    x = randn(32, features, seed=seed) + shift
    bare = NormSpec(eps=0.0, has_weight=False)
    layer, rms = norm(x, bare), norm(x, bare.replace(centered=False))
    ones = torch.ones(features, dtype=x.dtype) / math.sqrt(features)
    projected = x - (x @ ones)[:, None] * ones
    radius = math.sqrt(features)
    cosine = (x * rms).sum(-1) / x.norm(dim=-1) / rms.norm(dim=-1)
    return {
        "projection": error(layer, radius * projected / projected.norm(dim=-1, keepdim=True)),
        "along_ones": ((layer @ ones).abs().max() / radius).item(),
        "layer_radius": ((layer.norm(dim=-1) - radius).abs().max() / radius).item(),
        "rms_radius": ((rms.norm(dim=-1) - radius).abs().max() / radius).item(),
        "turned": (1 - cosine).abs().max().item(),
    }


def judge(rows: list[Row]) -> Verdict:
    parts = {text: worst(rows, name) for name, text in PARTS.items()}
    name, off = max(parts.items(), key=lambda part: part[1])
    return holds_if(off <= EXACT, f"the largest relative error is {off:.1e}, of “{name}”", **parts)


def plot(rows: list[Row], axes: Axes) -> None:
    errors(axes, list(PARTS.values()), [worst(rows, name) for name in PARTS])


CLAIM = Claim(
    id="projection",
    kind="exact",
    statement="LayerNorm projects off the all-ones direction and scales to radius √d; RMSNorm keeps the direction and "
    "scales to radius √d.",
    source="a tutorial's statement; Brody et al. 2023, arXiv:2305.02582",
    criterion=f"Against the projection written out, all five parts hold to {EXACT:g} in float64 (no eps, no gain).",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
