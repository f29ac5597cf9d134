"""Centring what is written to the stream turns LayerNorm into RMSNorm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, error, errors, least, randn, worst
from normkit.residual import Transformer, TransformerConfig
from normkit.spec import TORCH_LAYER

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    return [{"centre": "all writers"}, {"centre": "all but the embeddings"}, {"centre": "none"}]


def measure(*, seed: int, centre: str) -> dict[str, Any]:
    config = TransformerConfig(
        vocab=31, dim=24, depth=3, heads=4, placement="pre", norm=TORCH_LAYER, gated=False, act="gelu",
        attention_bias=True, ffn_bias=True, tie_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    with_layer = Transformer(config).double()
    _train(with_layer, seed)
    with_rms = Transformer(replace(config, norm=TORCH_LAYER.replace(centered=False))).double()
    with_rms.load_state_dict(with_layer.state_dict())
    with torch.no_grad():
        if centre != "none":
            _centre_branches(with_rms)
        if centre == "all writers":
            with_rms.embed.weight.sub_(with_rms.embed.weight.mean(1, keepdim=True))
        tokens = torch.randint(31, (2, 17), generator=torch.Generator().manual_seed(seed))
        return {"error": error(with_rms(tokens), with_layer(tokens))}


def _train(model: Transformer, seed: int) -> None:
    """Give every parameter a value that no initialization has: gains around 1, biases, means that are not 0."""
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * randn(*parameter.shape, seed=1000 * seed + n) + 0.05)


def _centre_branches(model: Transformer) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith((".output", ".down")):
            module.weight.sub_(module.weight.mean(0, keepdim=True))
            module.bias.sub_(module.bias.mean())


def judge(rows: list[Row]) -> Verdict:
    by = {name: [row for row in rows if row.cell["centre"] == name] for name in {r.cell["centre"] for r in rows}}
    folded, forgot = worst(by["all writers"], "error"), least(by["all but the embeddings"], "error")
    untouched = least(by["none"], "error")
    numbers: dict[str, float | str] = {
        "all writers centred": folded, "embeddings forgotten": forgot, "nothing centred": untouched,
    }  # fmt: skip
    if folded <= EXACT < min(forgot, untouched):
        because = f"logits agree to {folded:.1e}; with the embeddings forgotten they are off by {forgot:.2g} or more"
        return Verdict("holds", because, numbers)
    return Verdict("wrong as stated", f"with all writers centred the logits are off by {folded:.1e}", numbers)


def plot(rows: list[Row], axes: Axes) -> None:
    names = list(dict.fromkeys(row.cell["centre"] for row in rows))
    errors(axes, names, [worst([r for r in rows if r.cell["centre"] == name], "error") for name in names])
    axes.set_xlabel("relative error of the logits")


CLAIM = Claim(
    id="fold-to-rms",
    kind="exact",
    statement="Centring the weights that write to the residual stream turns a Pre-Norm model's LayerNorm into RMSNorm "
    "exactly.",
    source="Ashkboos et al. 2024 (SliceGPT), arXiv:2401.15024",
    criterion=f"Logits of a three-layer Transformer agree to {EXACT:g} in float64 once embeddings, output projections "
    "and their biases are centred, and do not where the embeddings are left out.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
