"""Padded positions in BatchNorm's statistics, with and without a mask, beside LayerNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, WRONG, graded, numbers
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import settings, t_interval, values
from normkit.nn import BatchNorm, LayerNorm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NORMS = ("batch", "batch with mask", "layer")
BATCH, LENGTH, DIM = 16, 32, 32


def cells(quick: bool) -> list[Cell]:
    """Norms by the share of padded positions."""
    return [{"norm": n, "padding": p} for n in NORMS for p in ((0.5,) if quick else (0.125, 0.25, 0.5, 0.75))]


def ragged(padding: float, pad: Tensor, location: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(x, which positions are valid): ``(B, T, C)`` with the padding's own vector behind each sequence."""
    length = LENGTH * (1 - padding)
    lengths = (length * (0.75 + 0.5 * torch.rand(BATCH))).round().clamp(1, LENGTH)
    valid = torch.arange(LENGTH) < lengths[:, None]
    x = location + scale * torch.randn(BATCH, LENGTH, DIM)
    return torch.where(valid[..., None], x, pad), valid


def measure(seed: int, norm: str, padding: float) -> dict[str, Any]:
    """How far padding moves the outputs at valid positions, in training and then in evaluation."""
    with seeded(seed), torch.no_grad():
        masked = norm == "batch with mask"
        module = LayerNorm(DIM) if norm == "layer" else BatchNorm(DIM, channel_dim=-1)
        pad, location, scale = torch.randn(DIM), torch.randn(DIM), torch.randn(DIM).exp()

        def apply(x: Tensor, valid: Tensor) -> Tensor:
            return module(x, mask=valid) if masked else module(x)

        for _ in range(50):  # the running statistics settle on batches like these
            apply(*ragged(padding, pad, location, scale))
        x, valid = ragged(padding, pad, location, scale)
        padded = apply(x, valid)[valid]
        alone = x[valid][None]
        clean = apply(alone, torch.ones(alone.shape[:2], dtype=torch.bool))[0]
        module.eval()
        evaluated = module(x[valid][None])[0]
    size = clean.pow(2).mean().sqrt()
    return {
        "change_in_training": ((padded - clean).pow(2).mean().sqrt() / size).item(),
        "change_in_evaluation": ((evaluated - clean).pow(2).mean().sqrt() / size).item(),
    }


def judge(rows: list[Row]) -> Verdict:
    """See ``CRITERION``."""
    shares = settings(rows, "padding")
    polluted = {p: t_interval(values(rows, "change_in_training", norm="batch", padding=p)) for p in shares}
    late = {p: t_interval(values(rows, "change_in_evaluation", norm="batch", padding=p)) for p in shares}
    others = [v for n in NORMS[1:] for v in values(rows, "change_in_training", norm=n)]
    others += values(rows, "change_in_evaluation", norm="layer")
    masked = max(values(rows, "change_in_evaluation", norm="batch with mask"))
    moved = [polluted[p].low > 0.05 and late[p].low > 0.05 for p in shares]
    outcome = graded(moved, NOT_SEEN) if max(others) < 1e-4 and masked < min(i.low for i in late.values()) else WRONG
    most = max(shares)
    return Verdict(
        outcome,
        f"with {most:.0%} padding plain BatchNorm's valid outputs move by {polluted[most]} of their size in training "
        f"and {late[most]} in evaluation; masked BatchNorm and LayerNorm by at most {max(others):.1e}, and masked "
        f"BatchNorm's evaluation, which estimates its statistics over batches, by at most {masked:.2g}",
        numbers(training=polluted[most], evaluation=late[most]) | {"masked_and_layer": max(others)},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Change in training against the share of padding."""
    lines(axes, rows, "padding", "change_in_training", "norm")


CRITERION = (
    "at each share of padding, plain BatchNorm's outputs at valid positions differ from those without padding by more "
    "than 5 % of their size (lower end of the 95 % t-interval over seeds), in training and evaluation, while masked "
    "BatchNorm and LayerNorm differ by less than 1e-4; within limits if at some shares only"
)
CLAIM = Claim(
    id="batchnorm-padding",
    kind="measured",
    statement="Padded positions pollute BatchNorm's statistics; masked BatchNorm and LayerNorm are immune.",
    source="tutorials' statement",
    criterion=CRITERION,
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
