"""Weight decay on a plain gain and on a gain stored around zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import normkit
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import holds_if

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS, RATE, DECAY = 300, 1e-2, 1.0
TOLERANCE = 1e-4
"""300 float32 multiplications."""


def cells(quick: bool) -> list[Cell]:
    return [{"offset": offset, "start": start} for offset in (0.0, 1.0) for start in (1.0, 1.5)]


def measure(*, seed: int, offset: float, start: float) -> dict[str, Any]:
    norm = normkit.nn.RMSNorm(8, weight_offset=offset)
    assert norm.weight is not None
    with torch.no_grad():
        norm.weight.fill_(start - offset)
    optimizer = torch.optim.AdamW(norm.parameters(), lr=RATE, weight_decay=DECAY)
    x = torch.ones(2, 8)
    gains = []
    for step in range(STEPS + 1):
        if step % 10 == 0:
            gains.append(norm(x).mean().item())  # rows of ones have RMS 1, so the output is the gain
        norm.weight.grad = torch.zeros_like(norm.weight)
        optimizer.step()
    return {"gains": gains, "predicted": offset + (start - offset) * (1 - RATE * DECAY) ** STEPS}


def judge(rows: list[Row]) -> Verdict:
    off = max(abs(r.result["gains"][-1] - r.result["predicted"]) for r in rows)
    plain = {r.cell["start"]: r.result["gains"][-1] for r in rows if r.cell["offset"] == 0}
    offset = {r.cell["start"]: r.result["gains"][-1] for r in rows if r.cell["offset"] == 1}
    towards = all(abs(g) < 0.1 * s for s, g in plain.items()) and all(
        abs(g - 1) <= 0.1 * abs(s - 1) + TOLERANCE for s, g in offset.items()
    )
    return holds_if(
        off <= TOLERANCE and towards,
        f"after {STEPS} steps of AdamW without gradient a plain gain of 1 is {plain[1.0]:.3f} and a (1 + w) gain of 1 "
        f"is {offset[1.0]:.3f}; from 1.5 they are {plain[1.5]:.3f} and {offset[1.5]:.3f}; (1 − lr · decay)^steps "
        f"predicts all four to {off:.0e}",
        **{"plain gain": plain[1.0], "(1 + w) gain": offset[1.0], "(1 + w) gain from 1.5": offset[1.5]},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    for row in rows:
        name = "1 + w" if row.cell["offset"] else "w"
        gains = row.result["gains"]
        axes.plot([10 * n for n in range(len(gains))], gains, label=f"gain {name}, from {row.cell['start']:g}")
    axes.set_xlabel("step of AdamW, zero gradient")
    axes.set_ylabel("gain")
    axes.set_ylim(bottom=0)
    axes.legend()


CLAIM = Claim(
    id="gain-offset-decay",
    kind="exact",
    statement="Weight decay pulls a plain gain towards 0, and a gain stored as 1 + w towards 1.",
    source="a tutorial on Gemma; Loshchilov and Hutter 2019 (AdamW), arXiv:1711.05101",
    criterion=f"After {STEPS} steps at lr {RATE:g}, decay {DECAY:g} and zero gradient, nine tenths of the way to 0 (or "
    f"1) are done, and (1 − lr · decay)^steps predicts the gains to {TOLERANCE:g}.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
