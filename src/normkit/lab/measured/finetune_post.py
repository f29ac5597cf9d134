"""Fine-tuning a Post-LN and a Pre-LN model on other text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, WRONG, best, gain, numbers
from normkit.lab.setups.language import language_loss, language_model, train_language, validate
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select
from normkit.lab.setups.text import fixed_windows, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    """Placements by the rate of fine-tuning."""
    depth, steps, tuning, rates = (2, 6, 4, (1e-3,)) if quick else (6, 250, 60, (5e-4, 2e-3))
    return [
        {"placement": p, "rate": r, "depth": depth, "steps": steps, "tuning": tuning}
        for p in ("post", "pre")
        for r in rates
    ]


def measure(seed: int, placement: str, rate: float, depth: int, steps: int, tuning: int) -> dict[str, Any]:
    """Losses before and after fine-tuning from source to prose, and the first layer's gradient over the last's."""
    with seeded(seed):
        model = language_model(placement=placement, depth=depth)
        before = train_language(model, steps=steps, rate=3e-3, warm_up=steps // 5).validation
        zero_shot = validate(model, "prose")
        loss = language_loss(model, *fixed_windows(text("prose").train, 32, 16))
        layers = [model.stack.layers[n].ffn.sublayer.up.weight for n in (0, -1)]
        first, last = (g.norm().item() for g in torch.autograd.grad(loss, layers))
        tuned = train_language(model, steps=tuning, rate=rate, warm_up=tuning // 10, corpus="prose").validation
    return {
        "pretrained": before,
        "before_tuning": zero_shot,
        "tuned": tuned,
        "gained": zero_shot - tuned,
        "forgotten": validate(model) - before,
        "first_over_last_gradient": first / last,
    }


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    at = {p: {"placement": p, "rate": best(rows, "tuned", "rate", placement=p)} for p in ("post", "pre")}
    better = gain(rows, "tuned", better=at["post"], than=at["pre"])
    pretrained = gain(rows, "pretrained", better=at["post"], than=at["pre"])
    keeps = gain(rows, "forgotten", better=at["post"], than=at["pre"])
    gradient = {
        p: over_seeds(select(rows, **at[p]), lambda own: own[0].result["first_over_last_gradient"])
        for p in ("post", "pre")
    }
    outcome = "holds" if better.low > 0 else WRONG if better.high < 0 else NOT_SEEN
    return Verdict(
        outcome,
        f"after fine-tuning Post-LN's loss is below Pre-LN's by {better} nats (below 0: above it; before, on its own "
        f"text, by {pretrained}), and it forgets {keeps} nats less; the first layer's gradient is {gradient['post']} "
        f"times the last's in Post-LN, {gradient['pre']} in Pre-LN; such small models say little of pretrained ones",
        numbers(post_gain=better, pretrained_gain=pretrained, forgets_less=keeps),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Loss after fine-tuning against its rate."""
    lines(axes, rows, "rate", "tuned", "placement", log="x")


CLAIM = Claim(
    id="finetune-post",
    kind="measured",
    statement="Post-Norm is better for fine-tuning, since vanishing gradients protect what was learnt.",
    source="a tutorial's statement, from one source alone",
    criterion="two models pretrained alike on one text and fine-tuned on another, each at its best rate: Post-LN's "
    "validation loss on the new text is lower (95 % t-interval over seeds, paired); wrong as stated if it is higher; "
    "what is forgotten, and whether the first layers' gradients vanish, is reported",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
