"""Which changes of weights and inputs each norm ignores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.functional import norm as apply
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import error, holds_if, randn
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INVARIANT = 1e-9
"""Below: ignored. The changes that are not ignored move the output by more than a per cent."""

CHANGES = ("weight scaling", "weight shift", "one weight vector", "input scaling", "input shift", "one sample")
PAPERS = {  # Ba et al. 2016, table 1; Zhang and Sennrich 2019, table 1
    "BatchNorm": (True, False, True, True, True, False),
    "WeightNorm": (True, False, True, False, False, False),
    "LayerNorm": (True, True, False, True, False, True),
    "RMSNorm": (True, False, False, True, False, True),
}


def _output(name: str, weight: Tensor, x: Tensor) -> Tensor:
    """The norm of a linear layer's output, without eps."""
    if name == "WeightNorm":
        return x @ (weight / weight.norm(dim=1, keepdim=True)).T
    spec = NormSpec(eps=0.0, has_weight=False)
    if name == "BatchNorm":
        spec = spec.replace(axes="batch", channel_dim=1)
    return apply(x @ weight.T, spec.replace(centered=name != "RMSNorm"))


def _changed(change: str, weight: Tensor, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    if change == "weight scaling":
        return weight * 1.7, x
    if change == "weight shift":  # every neuron's weights move by the same vector
        return weight + randn(weight.shape[1], seed=seed + 10), x
    if change == "one weight vector":
        return torch.cat([weight[:1] * 1.7, weight[1:]]), x
    if change == "input scaling":
        return weight, x * 1.7
    if change == "input shift":
        return weight, x + randn(x.shape[1], seed=seed + 11)
    return weight, torch.cat([x[:1] * 1.7, x[1:]])


def cells(quick: bool) -> list[Cell]:
    return [{"norm": name} for name in PAPERS]


def measure(*, seed: int, norm: str) -> dict[str, Any]:
    weight, x = randn(7, 5, seed=seed), randn(16, 5, seed=seed + 1)
    before = _output(norm, weight, x)
    return {change: error(_output(norm, *_changed(change, weight, x, seed)), before) for change in CHANGES}


def _table(rows: list[Row]) -> dict[str, tuple[bool, ...]]:
    found: dict[str, tuple[bool, ...]] = {}
    for name in dict.fromkeys(row.cell["norm"] for row in rows):
        own = [row for row in rows if row.cell["norm"] == name]
        found[name] = tuple(all(row.result[change] <= INVARIANT for row in own) for change in CHANGES)
    return found


def judge(rows: list[Row]) -> Verdict:
    found = _table(rows)
    differ = [
        f"{name} under {change}"
        for name, wanted in PAPERS.items()
        for change, a, b in zip(CHANGES, found[name], wanted, strict=True)
        if a != b
    ]
    count = len(PAPERS) * len(CHANGES)
    because = f"{count - len(differ)} of {count} entries are as in the papers' tables"
    return holds_if(
        not differ,
        because + (f"; not so: {', '.join(differ)}" if differ else ""),
        **{name: ", ".join(c for c, yes in zip(CHANGES, row, strict=True) if yes) for name, row in found.items()},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    found = _table(rows)
    axes.imshow([[int(v) for v in row] for row in found.values()], cmap="Greens", vmin=0, vmax=2, aspect="auto")
    for y, row in enumerate(found.values()):
        for x, ignored in enumerate(row):
            axes.text(x, y, "ignored" if ignored else "seen", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(CHANGES)), [change.replace(" ", "\n", 1) for change in CHANGES])
    axes.set_yticks(range(len(found)), list(found))
    axes.grid(False)


CLAIM = Claim(
    id="invariances",
    kind="exact",
    statement="Which changes a norm ignores: BN scaling of all or one neuron's weights and of the data set, and its "
    "shift; LN scaling and shift of all weights, scaling of the data set or one sample; RMSNorm as LN without the "
    "shift; WN only weight scaling.",
    source="Ba et al. 2016, arXiv:1607.06450, table 1; Zhang and Sennrich 2019, arXiv:1910.07467",
    criterion=f"A norm behind a linear layer, in float64 without eps, ignores a change if its output moves by at most "
    f"{INVARIANT:g}; all 24 entries must be as in the papers.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
