"""Two texts disagree on what the running variance accumulates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import error, holds_if, least, lines, randn, worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUFFERS = 1e-5
"""The running variance is float32, and a momentum of 1 replaces it by the batch's."""


def cells(quick: bool) -> list[Cell]:
    return [{"batch": m} for m in (2, 3, 4, 8, 32, 256)]


def measure(*, seed: int, batch: int) -> dict[str, Any]:
    x = randn(batch, 6, seed=seed, dtype=torch.float32) * 2 + 1
    module = torch.nn.BatchNorm1d(6, momentum=1.0)
    module(x)
    assert module.running_var is not None
    biased = x.double().var(0, unbiased=False)
    return {
        "biased": error(module.running_var, biased),
        "unbiased": error(module.running_var, x.double().var(0)),
        "factor": (module.running_var.double() / biased).mean().item(),
    }


def judge(rows: list[Row]) -> Verdict:
    biased, unbiased = worst(rows, "biased"), worst(rows, "unbiased")
    factor = {row.cell["batch"]: row.result["factor"] for row in rows}
    smallest, largest = min(factor), max(factor)
    because = (
        f"torch.nn.BatchNorm accumulates the {'biased' if biased <= BUFFERS else 'unbiased'} variance (off by "
        f"{min(biased, unbiased):.0e}, against {max(biased, least(rows, 'biased'), unbiased):.2g} at worst for the "
        f"other): {factor[smallest]:.3g} × the biased one at m = {smallest}, {factor[largest]:.3g} × at m = {largest}"
    )
    return holds_if(
        biased <= BUFFERS,
        because,
        **{f"kept / biased at m = {m}": value for m, value in factor.items()},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    own = [row for row in rows if row.seed == 0]
    m = [row.cell["batch"] for row in own]
    series = {
        "torch keeps, over the biased": [row.result["factor"] for row in own],
        "m/(m − 1)": [k / (k - 1) for k in m],
    }
    lines(axes, m, series, xlabel="batch size m", ylabel="ratio", log="x")


CLAIM = Claim(
    id="running-variance-seed",
    kind="exact",
    statement="The running variance accumulates σ² of the batch, the biased one that it normalizes with.",
    source="one tutorial's formula; another tutorial says unbiased, as do Ioffe and Szegedy 2015, arXiv:1502.03167",
    criterion=f"torch.nn.BatchNorm's running variance after one batch equals the biased variance to {BUFFERS:g}.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
