"""Whether a Pre-Norm block keeps the row mean of its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, bars, least, randn, worst
from normkit.residual import Residual
from normkit.spec import TORCH_LAYER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ZERO_MEAN = ("half of the norm", "linear, centred")


def cells(quick: bool) -> list[Cell]:
    return [{"branch": b} for b in (*ZERO_MEAN, "linear", "feed-forward")]


def _sublayer(branch: str, seed: int) -> torch.nn.Module:
    if branch == "half of the norm":
        return torch.nn.LeakyReLU(negative_slope=1.0)  # the identity; the block halves it below
    linear = torch.nn.Linear(32, 32, bias=False).double()
    with torch.no_grad():
        linear.weight.copy_(randn(32, 32, seed=seed) / 32**0.5)
        if branch == "linear, centred":
            linear.weight.sub_(linear.weight.mean(0))
    if branch != "feed-forward":
        return linear
    return torch.nn.Sequential(torch.nn.Linear(32, 64).double(), torch.nn.GELU(), torch.nn.Linear(64, 32).double())


def measure(*, seed: int, branch: str) -> dict[str, Any]:
    x = randn(16, 32, seed=seed + 1) + randn(16, 1, seed=seed + 2)
    block = Residual(_sublayer(branch, seed), "pre", 32, norm=TORCH_LAYER).double()
    with torch.no_grad():
        y = block(x)
        y = x + 0.5 * (y - x) if branch == "half of the norm" else y
        return {"moved": ((y - x).mean(-1).abs() / x.std(-1)).max().item()}


def judge(rows: list[Row]) -> Verdict:
    zero = worst([row for row in rows if row.cell["branch"] in ZERO_MEAN], "moved")
    other = least([row for row in rows if row.cell["branch"] not in ZERO_MEAN], "moved")
    numbers: dict[str, float | str] = {"branches with zero mean": zero, "other branches, least": other}
    if max(zero, worst(rows, "moved")) <= EXACT:
        return Verdict("holds", f"no branch moves a row mean by more than {zero:.0e} std", numbers)
    if zero > EXACT:
        return Verdict("wrong as stated", f"even a branch with zero mean moves it by {zero:.1e} std", numbers)
    because = (
        f"only for a branch whose output has zero mean ({zero:.0e} std); an ordinary one moves it by {other:.2g} std"
    )
    return Verdict("holds within limits", because + " or more", numbers)


def plot(rows: list[Row], axes: Axes) -> None:
    names = list(dict.fromkeys(row.cell["branch"] for row in rows))
    heights = [worst([row for row in rows if row.cell["branch"] == name], "moved") for name in names]
    bars(axes, names, {"moved": heights}, ylabel="largest move of a row mean, in std")


CLAIM = Claim(
    id="pre-row-mean",
    kind="exact",
    statement="Pre-Norm keeps the row mean of the residual stream, where Post-Norm centres it.",
    source="a tutorial's exercise",
    criterion=f"Row means of y = x + F(LN(x)) are those of x to {EXACT:g} std: for every branch F (holds), or only for "
    "branches whose output has zero mean (within limits).",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
