"""The eps that libraries and papers use, and what the choice changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._families import FAMILIES, audit_family
from normkit.lab.exact._shared import error, randn, table
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

USUAL = (1e-5, 1e-6)
MATTERS = 0.01
"""A change of the output that half precision resolves (bfloat16 rounds at 0.4 %)."""

TORCH = {
    "torch LayerNorm": lambda: torch.nn.LayerNorm(8),
    "torch GroupNorm": lambda: torch.nn.GroupNorm(2, 8),
    "torch BatchNorm": lambda: torch.nn.BatchNorm1d(8),
}
SQUARES = (1.0, 1e-2, 4e-4, 1e-4)


def cells(quick: bool) -> list[Cell]:
    sources = [*TORCH, "torch RMSNorm", *FAMILIES]
    return [{"of": name} for name in sources] + [{"mean_square": s} for s in SQUARES]


def measure(*, seed: int, of: str = "", mean_square: float = 0.0) -> dict[str, Any]:
    if mean_square:
        return _effect(mean_square, seed)
    if of in TORCH:
        return {"eps": [TORCH[of]().eps]}
    if of == "torch RMSNorm":  # its default, None, means the machine epsilon of what it computes in
        assert torch.nn.RMSNorm(8).eps is None
        return {"eps": [torch.finfo(torch.float32).eps]}
    return {"eps": sorted({n.spec.eps for n in audit_family(of).norms if n.spec is not None})}


def _effect(mean_square: float, seed: int) -> dict[str, Any]:
    """How far the output moves between the two eps, on rows of that mean square and a trained-like gain."""
    x = randn(64, 128, seed=seed)
    x = x / x.square().mean(-1, keepdim=True).sqrt() * mean_square**0.5
    gain = 1 + 0.3 * randn(128, seed=seed + 1)
    outputs = [norm(x, NormSpec(eps=eps, centered=False), gain) for eps in USUAL]
    return {"changed": error(outputs[0], outputs[1])}


def judge(rows: list[Row]) -> Verdict:
    found = {row.cell["of"]: row.result["eps"] for row in rows if "of" in row.cell}
    effect = {row.cell["mean_square"]: row.result["changed"] for row in rows if "mean_square" in row.cell}
    others = {name: eps for name, eps in found.items() if not all(_is_usual(e) for e in eps)}
    matters = [s for s, changed in effect.items() if changed > MATTERS]
    numbers: dict[str, float | str] = {name: ", ".join(f"{e:g}" for e in eps) for name, eps in found.items()}
    numbers |= {f"1e-5 or 1e-6, mean square {s:g}": changed for s, changed in effect.items()}
    if not others and not matters:
        return Verdict("holds", f"all {len(found)} use one of them, and it does not matter which", numbers)
    if len(others) > len(found) / 2:
        return Verdict("wrong as stated", f"{len(others)} of {len(found)} use another eps", numbers)
    named = ", ".join(f"{name} {', '.join(f'{e:.3g}' for e in eps)}" for name, eps in others.items())
    because = (
        f"{len(found) - len(others)} of {len(found)} defaults are 1e-5 or 1e-6 ({named or 'no other'}). Which of the "
        f"two matters from a mean square of {max(matters):g} down ({effect[max(matters)]:.1%} of the output)"
        if matters
        else f"{len(found) - len(others)} of {len(found)} defaults are 1e-5 or 1e-6; the others are {named}"
    )
    return Verdict("holds within limits", because, numbers)


def _is_usual(eps: float) -> bool:
    return any(abs(eps - usual) <= 0.01 * usual for usual in USUAL)


def plot(rows: list[Row], axes: Axes) -> None:
    lines = [(row.cell["of"], ", ".join(f"{e:.3g}" for e in row.result["eps"])) for row in rows if "of" in row.cell]
    lines += [
        (f"1e-5 against 1e-6, mean square {row.cell['mean_square']:g}", f"{row.result['changed']:.2%}")
        for row in rows
        if "mean_square" in row.cell
    ]
    table(axes, ("default of", "eps, or change of the output"), lines)


CLAIM = Claim(
    id="eps-defaults",
    kind="exact",
    statement="eps is 1e-5 or 1e-6, and either will do.",
    source="a tutorial's advice; texts differ on which is whose default",
    criterion="The defaults of torch's norms and of eight model families, by audit, are all one of the two, and "
    f"exchanging them changes no output by more than {MATTERS:.0%} (holds); within limits if at least half of the "
    "defaults are.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
