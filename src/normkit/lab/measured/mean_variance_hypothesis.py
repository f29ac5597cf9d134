"""The variance of hidden states and gradients with LayerNorm and with RMSNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.equivalence import NORMS
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.language import language_loss, language_model, train_language
from normkit.lab.setups.plotting import bars
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select, settings
from normkit.lab.setups.text import text, windows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = ("hidden_variance", "gradient_variance")
REDUCED = 0.9


def cells(quick: bool) -> list[Cell]:
    """Both norms, at initialization and after training."""
    depth, steps = (1, 6) if quick else (4, 200)
    return [{"norm": n, "steps": s, "depth": depth} for n in ("layer", "rms") for s in (0, steps)]


def measure(seed: int, norm: str, steps: int, depth: int) -> dict[str, Any]:
    """The variance of each branch input's features over tokens, and of each gradient over batches; means of both."""
    with seeded(seed):
        model = language_model(norm=NORMS[norm], depth=depth)
        if steps:
            train_language(model, steps=steps, rate=3e-3, warm_up=steps // 10)
    hidden: list[float] = []

    def note(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> None:
        hidden.append(out.detach().flatten(0, -2).var(0).mean().item())

    matrices = [p for p in model.stack.parameters() if p.dim() == 2]
    gradients = []
    with seeded(seed, 1):
        handles = [layer.ffn.sublayer.up.register_forward_hook(note) for layer in model.stack.layers]
        for _ in range(8):
            loss = language_loss(model, *windows(text().train, 8, 16))
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, matrices)]))
        for handle in handles:
            handle.remove()
    return {
        "hidden_variance": sum(hidden) / len(hidden),
        "gradient_variance": torch.stack(gradients).var(0).mean().item(),
    }


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    found = {}
    for steps in settings(rows, "steps"):
        for part in PARTS:

            def ratio(own: list[Row], part: str = part) -> float:
                size = {r.cell["norm"]: r.result[part] for r in own}
                return size["layer"] / size["rms"]

            found[f"{part}_{steps}"] = over_seeds(select(rows, steps=steps), ratio)
    shown = "; ".join(f"{name.replace('_', ' ')} steps: {i}" for name, i in found.items())
    return Verdict(
        graded((i.low > REDUCED for i in found.values()), "wrong as stated" if all(i.high < REDUCED for i in found.values())
               else "not reproduced at this scale"),
        f"LayerNorm's variance over RMSNorm's, after so many steps: {shown}",
        numbers(**found),
    )  # fmt: skip


def plot(rows: list[Row], axes: Axes) -> None:
    """The hidden variance after training."""
    trained = [r for r in rows if r.cell["steps"]]
    bars(axes, trained, "norm", "hidden_variance")


CLAIM = Claim(
    id="mean-variance-hypothesis",
    kind="measured",
    statement="Mean subtraction does not reduce the variance of hidden states or gradients.",
    source="Zhang and Sennrich 2019, arXiv:1910.07467",
    criterion="the variance of hidden features over tokens, and of gradients over batches, with LayerNorm is more than "
    "0.9 of that with RMSNorm, at initialization and after training (lower end of the 95 % t-interval over seeds); "
    "within limits if in some of these; wrong as stated if it is below 0.9 in all (upper end)",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=5,
)
