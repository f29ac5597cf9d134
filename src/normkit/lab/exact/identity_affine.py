"""Whether γ = σ and β = μ undo the normalization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, error, lines, randn, worst
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    return [{"eps": eps, "std": std} for std in (1.0, 1e-2) for eps in (0.0, 1e-6, 1e-5, 1e-3)]


def measure(*, seed: int, eps: float, std: float) -> dict[str, Any]:
    x = randn(64, 5, seed=seed) * std + 3 * std
    mean, variance = x.mean(0), x.var(0, unbiased=False)

    def undone(gain: torch.Tensor) -> float:
        y = norm(x, NormSpec(axes="batch", channel_dim=1, eps=eps, has_bias=True), gain, mean)
        return error(y - mean, x - mean)

    return {"sigma": undone(variance.sqrt()), "root": undone((variance + eps).sqrt())}


def judge(rows: list[Row]) -> Verdict:
    without = worst([r for r in rows if r.cell["eps"] == 0], "sigma")
    usual = worst([r for r in rows if r.cell["eps"] > 0], "sigma")
    root = worst(rows, "root")
    numbers: dict[str, float | str] = {"γ = σ, no eps": without, "γ = σ, eps": usual, "γ = √(σ² + eps)": root}
    if max(without, root) > EXACT:
        return Verdict("wrong as stated", f"even without eps the input is off by {max(without, root):.1e}", numbers)
    if usual <= EXACT:
        return Verdict("holds", f"the input comes back to {max(without, usual):.1e}, with and without eps", numbers)
    because = (
        f"only without eps: the input then comes back to {without:.1e}; with eps γ = σ leaves it up to {usual:.1%} too "
        f"small, and γ = √(σ² + eps) brings it back to {root:.1e}"
    )
    return Verdict("holds within limits", because, numbers)


def plot(rows: list[Row], axes: Axes) -> None:
    with_eps = [row for row in rows if row.cell["eps"] > 0]
    eps = sorted({row.cell["eps"] for row in with_eps})
    series = {
        f"γ = σ, std {std:g}": [worst([r for r in with_eps if r.cell == {"eps": e, "std": std}], "sigma") for e in eps]
        for std in sorted({row.cell["std"] for row in with_eps})
    }
    lines(axes, eps, series, xlabel="eps", ylabel="input not restored, relative", log="xy")


CLAIM = Claim(
    id="identity-affine",
    kind="exact",
    statement="γ = σ and β = μ undo the normalization.",
    source="Ioffe and Szegedy 2015, arXiv:1502.03167; a tutorial's statement",
    criterion=f"The output of BatchNorm equals its input to {EXACT:g} in float64: with every eps (holds), or only with "
    "eps = 0 (holds within limits).",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
