"""Which published models use which norm, where."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._families import FAMILIES, audit_family
from normkit.lab.exact._shared import holds_if, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATED = {
    "BERT": ("layer", "post"),
    "GPT-2": ("layer", "pre"),
    "GPT-3": ("layer", "pre"),
    "Llama": ("rms", "pre"),
    "Qwen2": ("rms", "pre"),
    "PaLM": ("rms", "pre"),
    "Gemma 2": ("rms", "sandwich"),
    "OLMo 2": ("rms", "output"),
}


def cells(quick: bool) -> list[Cell]:
    return [{"model": name} for name in STATED]


def measure(*, seed: int, model: str) -> dict[str, Any]:
    result = audit_family(model)
    on_stream = [norm for norm in result.norms if norm.placement in ("pre", "post", "output")]
    return {
        "kinds": dict(Counter(norm.kind for norm in on_stream)),
        "placements": dict(Counter(branch.placement for branch in result.branches)),
        "biases": any(norm.spec is not None and norm.spec.has_bias for norm in on_stream),
        "built_from": "transformers" if model in FAMILIES else "its paper",
    }


def _found(row: Row) -> tuple[str, str]:
    def only(counts: dict[str, int]) -> str:
        return next(iter(counts)) if len(counts) == 1 else " and ".join(sorted(counts))

    return only(row.result["kinds"]), only(row.result["placements"]).replace("parallel", "pre")


def judge(rows: list[Row]) -> Verdict:
    wrong = {row.cell["model"]: row for row in rows if _found(row) != STATED[row.cell["model"]]}
    corrections = [
        f"{name} is stated as {' '.join(STATED[name])} and is {' '.join(_found(row))}"
        + ("" if row.result["biases"] else ", without bias")
        + f" (built from {row.result['built_from']})"
        for name, row in wrong.items()
    ]
    because = f"{len(rows) - len(wrong)} of {len(rows)} entries are right"
    return holds_if(
        not wrong,
        f"{because}; {'; '.join(corrections)}" if wrong else because,
        **{row.cell["model"]: " ".join(_found(row)) for row in rows},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    lines = [
        (
            row.cell["model"],
            " ".join(STATED[row.cell["model"]]),
            " ".join(_found(row)) + (", bias" if row.result["biases"] else ""),
            row.result["built_from"],
            "✓" if _found(row) == STATED[row.cell["model"]] else "✗",
        )
        for row in rows
    ]
    table(axes, ("model", "stated", "audited", "built from", ""), lines)


CLAIM = Claim(
    id="model-table",
    kind="exact",
    statement="BERT: LayerNorm, post. GPT-2 and GPT-3: LayerNorm, pre. Llama, Qwen and PaLM: RMSNorm, pre. Gemma 2: "
    "RMSNorm, sandwich. OLMo 2: RMSNorm on the branch's output.",
    source="two tutorials' tables; PaLM itself: Chowdhery et al. 2022, arXiv:2204.02311 (LayerNorm without bias)",
    criterion="An audit of each model finds that kind of norm at that placement in every layer. GPT-3 and PaLM, never "
    "released, are built as their papers say; a parallel block counts as pre.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
