"""Norms a layer, counted on built models."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._families import LAYERS, audit_family
from normkit.lab.exact._shared import holds_if, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATED = {  # family: the placement it stands for, norms a layer, norms at the end
    "BERT": ("post", 2, 0),
    "GPT-2": ("pre", 2, 1),
    "Llama": ("pre", 2, 1),
    "Gemma 2": ("sandwich", 4, None),
    "OLMo 2": ("output", 2, None),
}
"""None: the statement says nothing of the end."""


def cells(quick: bool) -> list[Cell]:
    return [{"family": name} for name in STATED]


def measure(*, seed: int, family: str) -> dict[str, Any]:
    result = audit_family(family)
    seats = Counter(norm.placement for norm in result.norms)
    return {
        "branches": dict(Counter(branch.placement for branch in result.branches)),
        "seats": dict(seats),
        "per_layer": sum(seats[s] for s in ("pre", "post", "output")) / LAYERS,
        "final": seats["final"],
        "qk_per_layer": seats["qk"] / LAYERS,
        "eps": sorted({norm.spec.eps for norm in result.norms if norm.spec is not None}),
    }


def judge(rows: list[Row]) -> Verdict:
    wrong = []
    for row in rows:
        placement, per_layer, final = STATED[row.cell["family"]]
        got = row.result
        fits = set(got["branches"]) == {placement} and got["per_layer"] == per_layer
        if not fits or (final is not None and got["final"] != final):
            wrong.append(
                f"{row.cell['family']} has {got['per_layer']:g} a layer and {got['final']} final, {got['branches']}"
            )
    counts = ", ".join(f"{r.cell['family']} {r.result['per_layer']:g} + {r.result['final']}" for r in rows)
    unsaid = [r.cell["family"] for r in rows if STATED[r.cell["family"]][2] is None and r.result["final"]]
    extra = [
        f"{r.result['qk_per_layer']:g} on queries and keys in {r.cell['family']}"
        for r in rows
        if r.result["qk_per_layer"]
    ]
    eps = next((r.result["eps"] for r in rows if r.cell["family"] == "Llama"), [])
    because = f"a layer + at the end: {counts}"
    if wrong:
        because += f"; not as stated: {'; '.join(wrong)}"
    if unsaid or extra:
        because += f". Beside them {', '.join([*(f'a final one in {name}' for name in unsaid), *extra])}"
    return holds_if(
        not wrong,
        because,
        **{"Llama's eps, library default": ", ".join(f"{e:g}" for e in eps)},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    lines = [
        (
            r.cell["family"],
            ", ".join(r.result["branches"]),
            f"{r.result['per_layer']:g}",
            r.result["final"],
            f"{r.result['qk_per_layer']:g}",
            ", ".join(f"{e:g}" for e in r.result["eps"]),
        )
        for r in rows
    ]
    table(axes, ("built model", "placement", "a layer", "final", "query and key,\na layer", "eps"), lines)


CLAIM = Claim(
    id="norm-counts",
    kind="exact",
    statement="Norms a layer: Post-Norm 2, Pre-Norm 2 and one at the end, sandwich (Gemma 2) 4, output (OLMo 2) 2.",
    source="a tutorial's table",
    criterion="An audit of built models finds these numbers on the stream of each layer, the placement that they stand "
    "for in every branch, and the stated end. Released Llama configs set eps 1e-5; the library's default is beside.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
