"""GPT-3's norm parameters, counted on a model without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import holds_if
from normkit.nn import Norm
from normkit.residual import Transformer
from normkit.spec import TORCH_LAYER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATED = 4_743_168
STATED_SHARE = 0.0027e-2


def cells(quick: bool) -> list[Cell]:
    return [{"dim": 12288, "depth": 96, "heads": 96, "vocab": 50257, "positions": 2048}]


def measure(*, seed: int, dim: int, depth: int, heads: int, vocab: int, positions: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = Transformer(
            vocab=vocab, dim=dim, depth=depth, heads=heads, norm=TORCH_LAYER, placement="pre", gated=False, act="gelu",
            attention_bias=True, ffn_bias=True, positions="learned", max_positions=positions,
        )  # fmt: skip
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    return {
        "formula": 2 * 2 * dim * depth + 2 * dim,
        "norms": len(norms),
        "norm_parameters": sum(p.numel() for norm in norms for p in norm.parameters()),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def judge(rows: list[Row]) -> Verdict:
    (row,) = rows
    counted, total = row.result["norm_parameters"], row.result["parameters"]
    share = counted / total
    return holds_if(
        counted == row.result["formula"] == STATED and abs(share - STATED_SHARE) < 0.00005e-2,
        f"the built model has {row.result['norms']} norms with {counted:,} of {total:,} parameters, {share:.4%}; the "
        f"formula gives {row.result['formula']:,}",
        **{"norm parameters": counted, "all parameters": total, "share in %": 100 * share},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    (row,) = rows
    counts = [row.result["norm_parameters"], row.result["parameters"] - row.result["norm_parameters"]]
    axes.barh([0, 1], counts, color=["C1", "C0"])
    axes.set_yticks([0, 1], ["norms", "the rest"])
    axes.set_xscale("log")
    axes.set_xlim(1e6, 1e13)
    axes.set_xlabel("parameters of GPT-3 175B")
    for n, count in enumerate(counts):
        axes.annotate(f"{count:,}", (count, n), xytext=(4, 0), textcoords="offset points", va="center")


CLAIM = Claim(
    id="parameter-share",
    kind="exact",
    statement="GPT-3 175B has 2 · 2 · 12288 · 96 + 2 · 12288 = 4 743 168 norm parameters, 0.0027 % of all.",
    source="a tutorial's count; Brown et al. 2020, arXiv:2005.14165 for the sizes",
    criterion="A Transformer of these sizes, built on the meta device, has exactly that many parameters in its norms, "
    "and their share rounds to 0.0027 %.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
