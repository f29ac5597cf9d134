"""One outlier sample in a batch: what it does to the others' outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, WRONG, graded, numbers
from normkit.lab.setups.mlp import make_norm
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import settings, t_interval, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCH, DIM = 32, 64


def cells(quick: bool) -> list[Cell]:
    """Norms by the outlier's size, as a multiple of the other samples'."""
    return [
        {"norm": n, "size": s} for n in ("batch", "layer") for s in ((10.0,) if quick else (3.0, 10.0, 30.0, 100.0))
    ]


def measure(seed: int, norm: Any, size: float) -> dict[str, Any]:
    """The change of the clean samples' outputs when one other sample grows, relative to their size."""
    with seeded(seed), torch.no_grad():
        x = torch.randn(DIM) + torch.randn(DIM).exp() * torch.randn(BATCH, DIM)
        module = make_norm(norm, DIM)
        clean = module(x)[1:]
        x[0] *= size
        disturbed = module(x)[1:]
    return {"change": ((disturbed - clean).pow(2).mean() / clean.pow(2).mean()).sqrt().item()}


def judge(rows: list[Row]) -> Verdict:
    """See ``CRITERION``."""
    sizes = settings(rows, "size")
    batch = {s: t_interval(values(rows, "change", norm="batch", size=s)) for s in sizes}
    layer = max(values(rows, "change", norm="layer"))
    outcome = graded((batch[s].low > 0.1 for s in sizes), NOT_SEEN) if layer < 1e-6 else WRONG
    shown = ", ".join(f"{batch[s]} at {s:g} times the size" for s in sizes)
    return Verdict(
        outcome,
        f"one outlier among {BATCH} samples moves the others' outputs by {shown} with BatchNorm, by {layer:.1e} with "
        f"LayerNorm",
        numbers(**{f"batch_{s:g}": batch[s] for s in sizes}) | {"layer": layer},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Change against the outlier's size."""
    lines(axes, rows, "size", "change", "norm", log="x")


CLAIM = Claim(
    id="batchnorm-outliers",
    kind="measured",
    statement="One outlier sample disturbs BatchNorm's other samples, and not LayerNorm's.",
    source="a tutorial's statement",
    criterion="the clean samples' outputs move by more than 10 % of their size (lower end of the 95 % t-interval over "
    "seeds) at every size of the outlier with BatchNorm, and by less than 1e-6 with LayerNorm; within limits if at "
    "some sizes only",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=5,
)
