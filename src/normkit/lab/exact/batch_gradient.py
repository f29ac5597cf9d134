"""BatchNorm's input gradient, by formula and by autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import normkit
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, error, errors, holds_if, least, randn, worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EPS = 1e-3


def cells(quick: bool) -> list[Cell]:
    return [{"shape": shape} for shape in ([2, 3], [33, 5], [4, 7, 5, 3])]


def measure(*, seed: int, shape: list[int]) -> dict[str, Any]:
    x = (randn(*shape, seed=seed) * 2 + 1).requires_grad_()
    gain, bias = randn(shape[1], seed=seed + 1) + 1, randn(shape[1], seed=seed + 2)
    upstream = randn(*shape, seed=seed + 3)
    y = torch.nn.functional.batch_norm(x, None, None, gain, bias, training=True, eps=EPS)
    (by_torch,) = torch.autograd.grad(y, x, upstream)
    y = normkit.functional.batch_norm(x, None, None, gain, bias, training=True, eps=EPS)
    (by_normkit,) = torch.autograd.grad(y, x, upstream)

    dims = [d for d in range(len(shape)) if d != 1]
    value = x.detach()
    g = upstream * gain.view(-1, *[1] * (len(shape) - 2))  # the gradient at x̂
    sigma = (value.var(dims, unbiased=False, keepdim=True) + EPS).sqrt()
    hat = (value - value.mean(dims, keepdim=True)) / sigma
    formula = (g - g.mean(dims, keepdim=True) - hat * (g * hat).mean(dims, keepdim=True)) / sigma
    return {
        "torch": error(by_torch, formula),
        "normkit": error(by_normkit, formula),
        "without_last_term": error((g - g.mean(dims, keepdim=True)) / sigma, formula),
    }


def judge(rows: list[Row]) -> Verdict:
    off, other, needed = worst(rows, "torch"), worst(rows, "normkit"), least(rows, "without_last_term")
    return holds_if(
        max(off, other) <= EXACT < needed,
        f"autograd differs from the formula by at most {off:.1e} (torch) and {other:.1e} (normkit); without the "
        f"x̂ term it would be off by {needed:.2g} or more",
        **{"torch": off, "normkit": other, "without the x̂ term": needed},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    names = {"torch": "torch autograd", "normkit": "normkit autograd", "without_last_term": "formula without x̂ term"}
    errors(axes, list(names.values()), [worst(rows, name) for name in names])


CLAIM = Claim(
    id="batch-gradient",
    kind="exact",
    statement="With g the gradient at x̂, BatchNorm's input gradient is (1/σ)(g − mean g − x̂ · mean(g x̂)).",
    source="a tutorial's derivation; Ioffe and Szegedy 2015, arXiv:1502.03167",
    criterion=f"Autograd through torch and through normkit agrees with it to {EXACT:g} in float64, with "
    "σ = √(variance + eps), and dropping its last term would not.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
