"""Outlier features under LayerNorm and RMSNorm: the change of outputs and gradients at the other features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, WRONG, numbers, within
from normkit.lab.setups.mlp import make_norm
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCH, DIM = 64, 256
KINDS = ("one feature", "eight of one sign", "eight of both signs")


def cells(quick: bool) -> list[Cell]:
    """Outliers by kind and size, on rows with mean 0 and with mean 1."""
    return [
        {"outliers": k, "size": s, "mean": m}
        for k in KINDS
        for s in ((30.0,) if quick else (10.0, 30.0, 100.0))
        for m in ((0.0,) if quick else (0.0, 1.0))
    ]


def planted(x: Tensor, outliers: str, size: float) -> tuple[Tensor, int]:
    """(x with outliers in its first features, how many there are)."""
    count = 1 if outliers == "one feature" else 8
    signs = torch.ones(count)
    if outliers == "eight of both signs":
        signs[1::2] = -1
    y = x.clone()
    y[:, :count] = size * signs
    return y, count


def measure(seed: int, outliers: str, size: float, mean: float) -> dict[str, Any]:
    """The relative change, with each norm, of output and input gradient at the features that are no outliers."""
    found = {}
    with seeded(seed):
        x, upstream = torch.randn(BATCH, DIM, dtype=torch.float64) + mean, torch.randn(BATCH, DIM, dtype=torch.float64)
    y, count = planted(x, outliers, size)
    for name in ("layer", "rms"):
        norm = make_norm(name, DIM).double()

        def both(rows: Tensor, norm: torch.nn.Module = norm) -> tuple[Tensor, Tensor]:
            rows = rows.clone().requires_grad_()
            out = norm(rows)
            (gradient,) = torch.autograd.grad(out, rows, upstream)
            return out.detach()[:, count:], gradient[:, count:]

        for part, before, after in zip(("output", "gradient"), both(x), both(y), strict=True):
            found[f"{part}_{name}"] = ((after - before).norm() / before.norm()).item()
    for part in ("output", "gradient"):
        found[f"{part}_ratio"] = found[f"{part}_rms"] / found[f"{part}_layer"]
    return found


def judge(rows: list[Row]) -> Verdict:
    """See ``CRITERION``."""
    parts = ("output", "gradient")
    spread: dict[str, list] = {part: [] for part in parts}
    for cell in {tuple(sorted(r.cell.items())) for r in rows}:
        own = [r for r in rows if r.cell == dict(cell)]
        for part in parts:
            spread[part].append(over_seeds(own, lambda found, part=part: found[0].result[f"{part}_ratio"]))
    every = [i for part in parts for i in spread[part]]
    less, alike = [i.high < 0.9 for i in every], [within(i, 0.9, 1.1) for i in every]
    more = [i.low > 1.1 for i in every]
    if all(less):
        outcome = "holds"
    elif any(less):
        outcome = "holds within limits"
    else:
        outcome = WRONG if all(a or m for a, m in zip(alike, more, strict=True)) else NOT_SEEN
    low, high = min(i.low for i in every), max(i.high for i in every)
    whole = {part: over_seeds(rows, lambda found, part=part: _mean_ratio(found, part)) for part in parts}
    return Verdict(
        outcome,
        f"RMSNorm's change over LayerNorm's lies between {low:.3g} and {high:.3g} in all {len(every)} comparisons (mean "
        f"{whole['output']} for outputs, {whole['gradient']} for gradients): less by a tenth in {sum(less)}, alike "
        f"within a tenth in {sum(alike)}",
        numbers(**whole) | {"lowest": low, "highest": high},
    )


def _mean_ratio(rows: list[Row], part: str) -> float:
    return sum(r.result[f"{part}_ratio"] for r in rows) / len(rows)


def plot(rows: list[Row], axes: Axes) -> None:
    """The ratio of the outputs' changes against the outliers' size, for rows with mean 0."""
    lines(axes, rows, "size", "output_ratio", "outliers", log="x", mean=0.0)
    axes.axhline(1, color="grey", linewidth=1)


CLAIM = Claim(
    id="rms-outliers",
    kind="measured",
    statement="RMSNorm suffers less from outlier features than LayerNorm.",
    source="a tutorial's statement",
    criterion="the change that outliers make at the other features, RMSNorm's over LayerNorm's, is below 0.9 (upper "
    "end of the 95 % t-interval over seeds) for outputs and gradients, every kind, size and row mean; within limits if "
    "in some of them; wrong as stated if in each it is within 0.9 to 1.1 or above 1.1",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=5,
)
