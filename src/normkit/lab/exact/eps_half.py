"""What eps is in float16, and where a larger one matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import error, randn, table
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ADVISED = 1e-4


def cells(quick: bool) -> list[Cell]:
    return [{"eps": e} for e in (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)]


def measure(*, seed: int, eps: float) -> dict[str, Any]:
    zero = torch.zeros(64, dtype=torch.float16)
    stored = torch.tensor(eps, dtype=torch.float16)
    by_half = zero / (zero.pow(2).mean() + stored).sqrt()  # all in float16
    small = (randn(64, seed=seed) * 0.01).half()  # an activation of RMS 0.01
    exact = small.double() / small.double().square().mean().sqrt()

    def float32(x: torch.Tensor) -> torch.Tensor:
        return norm(x, NormSpec(eps=eps, centered=False, has_weight=False))

    return {
        "float16": stored.item(),
        "bfloat16": torch.tensor(eps, dtype=torch.bfloat16).item(),
        "zero_row_float16": by_half.abs().max().item(),
        "zero_row_float32": float32(zero).abs().max().item(),
        "small_row_float32": error(float32(small), exact),
    }


def judge(rows: list[Row]) -> Verdict:
    vanished = [r.cell["eps"] for r in rows if r.result["float16"] == 0]
    broken_half = [r.cell["eps"] for r in rows if r.result["zero_row_float16"] != 0]
    broken_wide = [r.cell["eps"] for r in rows if r.result["zero_row_float32"] != 0]
    cost = {r.cell["eps"]: r.result["small_row_float32"] for r in rows}
    small = min(e for e in cost if e not in broken_half)
    numbers: dict[str, float | str] = {
        "eps that are 0 in float16": ", ".join(f"{e:g}" for e in vanished) or "none",
        "eps that give NaN for a zero row, float16 throughout": ", ".join(f"{e:g}" for e in broken_half) or "none",
        "the same with float32 statistics": ", ".join(f"{e:g}" for e in broken_wide) or "none",
        f"error of a row of RMS 0.01 at eps {ADVISED:g}": cost[ADVISED],
        f"error of a row of RMS 0.01 at eps {small:g}": cost[small],
    }
    needed = broken_wide or [e for e in broken_half if e >= 1e-6]
    if needed and cost[ADVISED] <= 0.01:
        return Verdict("holds", f"smaller eps fail ({needed}), and {ADVISED:g} costs {cost[ADVISED]:.1%}", numbers)
    if not broken_half:
        return Verdict("wrong as stated", "no eps tried fails in half precision", numbers)
    because = (
        f"only {', '.join(f'{e:g}' for e in broken_half)} fail (they are 0 in float16), and only where eps itself is "
        f"held in float16; with float32 statistics {'some' if broken_wide else 'none'} do. {ADVISED:g} has a "
        f"price: a row of RMS 0.01 comes out {cost[ADVISED]:.0%} wrong, against {cost[small]:.1%} with {small:g}"
    )
    return Verdict("holds within limits", because, numbers)


def plot(rows: list[Row], axes: Axes) -> None:
    lines = [
        (
            f"{r.cell['eps']:g}",
            f"{r.result['float16']:.4g}",
            f"{r.result['bfloat16']:.4g}",
            "NaN" if r.result["zero_row_float16"] != 0 else "0",
            "NaN" if r.result["zero_row_float32"] != 0 else "0",
            f"{r.result['small_row_float32']:.2%}",
        )
        for r in rows
    ]
    heads = ("eps", "in float16", "in bfloat16", "zero row,\nall float16", "zero row,\nfloat32", "error at RMS 0.01")
    table(axes, heads, lines)


CLAIM = Claim(
    id="eps-half",
    kind="exact",
    statement="In half precision eps should be larger, 1e-4; 1e-8 and 1e-12 become 0 in float16.",
    source="a tutorial's advice",
    criterion="It holds if an eps of 1e-6 or more, or any with float32 statistics, gives NaN for a row of zeros, and "
    "1e-4 changes a row of RMS 0.01 by under 1 %; within limits if only smaller eps held in float16 fail.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
