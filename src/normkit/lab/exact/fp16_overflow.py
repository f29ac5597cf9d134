"""Where the sum of squares overflows float16, form by form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import table
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAXIMUM = torch.finfo(torch.float16).max


def _explicit_sum(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum() / x.numel()).sqrt()


def _mean(x: Tensor) -> Tensor:
    return x / x.pow(2).mean().sqrt()


def _float32(x: Tensor) -> Tensor:
    return (x.float() / x.float().pow(2).mean().sqrt()).half()


def _normkit(x: Tensor) -> Tensor:
    return norm(x, NormSpec(eps=1e-6, centered=False, has_weight=False))


FORMS = {
    "float16 .pow(2).sum() / n": _explicit_sum,
    "float16 .pow(2).mean()": _mean,
    "float32": _float32,
    "normkit": _normkit,
}


def cells(quick: bool) -> list[Cell]:
    return [{"magnitude": m, "features": 4096} for m in (2.0, 100.0, 255.0, 256.0, 10000.0)]


def measure(*, seed: int, magnitude: float, features: int) -> dict[str, Any]:
    x = torch.full((features,), magnitude, dtype=torch.float16)
    total = x.double().square().sum().item()
    outputs = {name: form(x).double().abs().max().item() for name, form in FORMS.items()}
    return {"sum_of_squares": total, "times_maximum": total / MAXIMUM, "outputs": outputs}


def judge(rows: list[Row]) -> Verdict:
    stated = next(row for row in rows if row.cell["magnitude"] == 100)
    times, total = stated.result["times_maximum"], stated.result["sum_of_squares"]
    wrong = {
        name: [r.cell["magnitude"] for r in rows if not abs(r.result["outputs"][name] - 1) < 0.01]
        for name in stated.result["outputs"]
    }
    numbers: dict[str, float | str] = {"sum of squares": total, "times the float16 maximum": times}
    numbers |= {f"wrong, {name}": ", ".join(f"{m:g}" for m in at) or "nowhere" for name, at in wrong.items()}
    arithmetic = abs(total - 4.1e7) < 0.05e7 and abs(times - 625) < 1
    if not arithmetic:
        return Verdict("wrong as stated", f"the sum is {total:.2g}, {times:.0f} × the maximum", numbers)
    at_100 = {name: stated.result["outputs"][name] for name, at in wrong.items() if 100 in at}
    wide = [name for name in wrong if "float32" in name or "normkit" in name]
    if any(wrong[name] for name in wide):
        return Verdict("wrong as stated", "float32 statistics do not give the right output either", numbers)
    half = [name for name in wrong if name not in wide]
    if all(name in at_100 for name in half):
        return Verdict("holds", f"every float16 form is wrong at 100: {numbers}", numbers)
    first = {name: f"{min(wrong[name]):g}" if wrong[name] else "no magnitude tried" for name in half}
    shown = "; ".join(f"{name} from {at}" for name, at in first.items())
    because = (
        f"the sum is {total:.3g}, {times:.0f} × the maximum, but what follows depends on the form: the output is wrong "
        f"with {shown}. At 100 the wrong output is {', '.join(f'{v:g}' for v in at_100.values()) or 'none'}, silently, "
        "not NaN; the mean accumulates wider and fails where one square overflows. Float32 statistics are right "
        "everywhere"
    )
    return Verdict("holds within limits", because, numbers)


def plot(rows: list[Row], axes: Axes) -> None:
    forms = list(rows[0].result["outputs"])
    lines = [[f"{r.cell['magnitude']:g}", *(f"{r.result['outputs'][f]:.4g}" for f in forms)] for r in rows]
    table(axes, ["magnitude", *forms], lines)
    axes.set_title("output of RMSNorm (right: 1)")


CLAIM = Claim(
    id="fp16-overflow",
    kind="exact",
    statement="4096 values of magnitude 100 have a sum of squares of 4.1e7, 625 × the float16 maximum, so RMSNorm must "
    "be computed in float32.",
    source="a tutorial's statement",
    criterion="The stated numbers are right; it holds if every form computed in float16 then gives a wrong output "
    "(right is 1) and the float32 ones do not, and within limits if only some forms do.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=1,
)
