"""What later layers contribute to the stream of a deep Pre-LN model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.language import language_model, train_language
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import log_slope, over_seeds, select, settings
from normkit.lab.setups.text import fixed_windows, text
from normkit.residual import Stream, Transformer, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    """Placements, at initialization and after training."""
    depth, steps = (4, 6) if quick else (16, 120)
    return [{"placement": p, "steps": s, "depth": depth} for p in ("pre", "post") for s in (0, steps)]


def run_layers(model: Transformer, tokens: Tensor, without: int | None = None) -> tuple[Tensor, list[float]]:
    """(log-probabilities, the share of each layer's change in the stream that it leaves); one layer may be left out."""
    stream, shares = Stream(model.embed(tokens) + model.position.weight[: tokens.shape[1]]), []
    for n, layer in enumerate(model.stack.layers):
        if n == without:
            continue
        before = stream.settle()
        stream = layer(stream, causal=True)
        after = stream.settle()
        shares.append(((after - before).norm() / after.norm()).item())
    return model.logits(finish(stream, model.stack.final_norm, fuse=False)).log_softmax(-1), shares


@torch.no_grad()
def measure(seed: int, placement: str, steps: int, depth: int) -> dict[str, Any]:
    """Each layer's share of the stream, and how far the predictions move (mean divergence) when it is left out."""
    with seeded(seed), torch.enable_grad():
        model = language_model(
            placement=placement, depth=depth, positions="learned", max_positions=16, embedding_std=0.2
        )
        if steps:
            train_language(model, steps=steps, rate=2e-3, warm_up=steps // 4)
    tokens, _ = fixed_windows(text().validation, 32, 16)
    whole, shares = run_layers(model, tokens)
    effects = []
    for n in range(depth):
        left, _ = run_layers(model, tokens, without=n)
        effects.append((whole.exp() * (whole - left)).sum(-1).mean().item())
    return {"shares": shares, "effects": effects}


def exponent(rows: list[Row], name: str) -> float:
    """The slope of a logarithm in that of the layer's number, of one seed's row."""
    found = rows[0].result[name]
    return log_slope(range(1, len(found) + 1), [max(v, 1e-12) for v in found]).mean


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    found = {
        (p, s, n): over_seeds(select(rows, placement=p, steps=s), lambda own, n=n: exponent(own, n))
        for p in ("pre", "post")
        for s in settings(rows, "steps")
        for n in ("shares", "effects")
    }
    checks = [i.high < -0.2 for (p, _, _), i in found.items() if p == "pre"]
    shown = "; ".join(f"{p}, {s} steps, {n}: {i}" for (p, s, n), i in found.items())
    return Verdict(
        graded(checks),
        f"exponents in the layer's number of its share of the stream, and of the predictions' change without it: {shown}",
        numbers(**{f"{p}_{s}_{n}": i for (p, s, n), i in found.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Shares by layer after training."""
    trained = max(settings(rows, "steps"))
    for n, name in enumerate(("pre", "post")):
        for row in select(rows, placement=name, steps=trained):
            shares = row.result["shares"]
            axes.plot(range(1, len(shares) + 1), shares, color=f"C{n}", label=name if row.seed == 0 else None)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of the stream after training")
    axes.legend()


CLAIM = Claim(
    id="branch-dilution",
    kind="measured",
    statement="In deep Pre-LN later branches contribute less and less of the stream: depth becomes width.",
    source="tutorials' statements; Xiong et al. 2020, arXiv:2002.04745",
    criterion="for Pre-LN the exponent in the layer's number of its share of the stream, and of the change of the "
    "predictions when it is left out, is below -0.2 at initialization and after training (upper ends of the 95 % "
    "t-intervals over seeds); within limits if for some of the four; Post-LN's are reported",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
