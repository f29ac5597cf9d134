"""Which variance BatchNorm normalizes with, and which it accumulates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import normkit
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import error, holds_if, least, lines, randn, worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUFFERS = 1e-6
"""Running statistics are float32 buffers."""


def cells(quick: bool) -> list[Cell]:
    return [{"batch": m, "library": lib} for m in (2, 4, 8, 32, 128) for lib in ("torch", "normkit")]


def measure(*, seed: int, batch: int, library: str) -> dict[str, Any]:
    x = randn(batch, 6, seed=seed, dtype=torch.float32) * 3 + 1
    module = (torch.nn if library == "torch" else normkit.nn).BatchNorm1d(6, momentum=0.5)
    y = module(x).detach()
    assert module.running_var is not None
    centred = x.double() - x.double().mean(0)
    biased, unbiased = centred.square().mean(0), centred.square().sum(0) / (batch - 1)
    kept = module.running_var.double() * 2 - 1  # from 0.5 · 1 + 0.5 · accumulated
    return {
        "normalized_biased": error(y, centred / (biased + module.eps).sqrt()),
        "normalized_unbiased": error(y, centred / (unbiased + module.eps).sqrt()),
        "accumulated_biased": error(kept, biased),
        "accumulated_unbiased": error(kept, unbiased),
    }


def judge(rows: list[Row]) -> Verdict:
    off = max(worst(rows, "normalized_biased"), worst(rows, "accumulated_unbiased"))
    other = min(least(rows, "normalized_unbiased"), least(rows, "accumulated_biased"))
    return holds_if(
        off <= BUFFERS < other,
        f"normalizing with the biased and keeping the unbiased variance reproduces torch and normkit to {off:.1e}; the "
        f"other way round is off by {other:.1e} or more",
        **{"as stated": off, "the other way round": other},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    own = [row for row in rows if row.cell["library"] == "torch" and row.seed == 0]
    lines(
        axes,
        [row.cell["batch"] for row in own],
        {
            "kept is the unbiased": [max(row.result["accumulated_unbiased"], 1e-9) for row in own],
            "kept is the biased": [row.result["accumulated_biased"] for row in own],
        },
        xlabel="batch size m",
        ylabel="relative error",
        log="xy",
    )


CLAIM = Claim(
    id="running-variance",
    kind="exact",
    statement="BatchNorm normalizes with the biased variance of the batch and accumulates the unbiased one.",
    source="Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 2; a tutorial on PyTorch",
    criterion=f"torch's and normkit's modules reproduce both to {BUFFERS:g}, and the other assignment does not.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
