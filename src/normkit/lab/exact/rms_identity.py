"""RMS² = variance + mean²."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, holds_if, least, randn, worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    return [{"features": d, "shift": m} for d in (3, 64, 1000) for m in (0.0, 0.5, 100.0)]


def measure(*, seed: int, features: int, shift: float) -> dict[str, Any]:
    x = randn(64, features, seed=seed) + shift
    mean, variance = x.mean(-1), x.var(-1, unbiased=False)
    rms, std = x.square().mean(-1).sqrt(), variance.sqrt()
    centred = x - mean[:, None]
    at_zero_mean = centred.square().mean(-1).sqrt()
    return {
        "error": ((rms.square() - variance - mean.square()).abs() / rms.square()).max().item(),
        "least_excess": ((rms - std) / rms).min().item(),
        "gap_at_zero_mean": ((at_zero_mean - centred.std(-1, unbiased=False)).abs() / at_zero_mean).max().item(),
        "ratios": (rms / std).tolist(),
        "means_over_std": (mean / std).tolist(),
    }


def judge(rows: list[Row]) -> Verdict:
    error, excess, gap = worst(rows, "error"), least(rows, "least_excess"), worst(rows, "gap_at_zero_mean")
    return holds_if(
        error <= EXACT and excess > 0 and gap <= EXACT,
        f"the identity is off by at most {error:.1e} of RMS²; every row with a mean has RMS > std (the least by "
        f"{excess:.1e}), and with the mean taken off they differ by at most {gap:.1e}",
        **{"largest error": error, "least RMS − std": excess, "largest gap at zero mean": gap},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    for row in rows:
        if row.cell["shift"] <= 1:
            axes.scatter(row.result["means_over_std"], row.result["ratios"], s=4, color="C0", alpha=0.4)
    grid = [g / 50 for g in range(-100, 101)]
    axes.plot(grid, [(1 + g * g) ** 0.5 for g in grid], color="C1", label="√(1 + (mean/std)²)")
    axes.set_xlim(-2, 2)
    axes.set_ylim(0.9, 2.3)
    axes.set_xlabel("mean / std of a row")
    axes.set_ylabel("RMS / std")
    axes.legend()


CLAIM = Claim(
    id="rms-identity",
    kind="exact",
    statement="RMS² = variance + mean²; hence RMS ≥ std, with equality only for zero mean.",
    source="two tutorials; Zhang and Sennrich 2019, arXiv:1910.07467",
    criterion=f"The identity holds to {EXACT:g} in float64 on random rows, RMS > std on all of them, and RMS = std to "
    f"{EXACT:g} once their mean is taken off.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
