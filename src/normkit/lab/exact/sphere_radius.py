"""The radius of the sphere that a norm projects onto."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normkit.functional import norm as apply
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, holds_if, lines, randn, worst
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    return [{"features": d, "norm": n} for n in ("LayerNorm", "RMSNorm") for d in (2, 4, 64, 768, 4096)]


def measure(*, seed: int, features: int, norm: str) -> dict[str, Any]:
    x = randn(8, features, seed=seed) * 0.01 + 0.02
    centered = norm == "LayerNorm"
    lengths = _lengths(x, NormSpec(eps=0.0, has_weight=False, centered=centered))
    with_eps = _lengths(x, NormSpec(eps=1e-5, has_weight=False, centered=centered))
    return {"least": lengths.min().item(), "largest": lengths.max().item(), "with_eps": with_eps.min().item()}


def _lengths(x: Any, spec: NormSpec) -> Any:
    return apply(x, spec).norm(dim=-1)


def judge(rows: list[Row]) -> Verdict:
    def off(radius: float, row: Row) -> float:
        return max(abs(row.result[n] - radius) / radius for n in ("least", "largest"))

    unit = max(off(1.0, row) for row in rows)
    root = max(off(math.sqrt(row.cell["features"]), row) for row in rows)
    shrunk = 1 - min(row.result["with_eps"] / math.sqrt(row.cell["features"]) for row in rows)
    found = "it is √d" if root <= EXACT else "it is neither 1 nor √d"
    return holds_if(
        unit <= EXACT,
        f"the radius is up to {unit:.3g} away from 1; {found} (to {root:.0e}), before the gain, and with eps 1e-5 up "
        f"to {shrunk:.1%} smaller on inputs of std 0.01",
        **{"error of radius 1": unit, "error of radius √d": root, "shrunk by eps": shrunk},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    own = [row for row in rows if row.seed == 0]
    d = sorted({row.cell["features"] for row in own})
    series = {
        name: [worst([r for r in own if r.cell == {"features": k, "norm": name}], "largest") for k in d]
        for name in ("LayerNorm", "RMSNorm")
    }
    lines(axes, d, {**series, "√d": [math.sqrt(k) for k in d]}, xlabel="features d", ylabel="length", log="xy")


CLAIM = Claim(
    id="sphere-radius",
    kind="exact",
    statement="LayerNorm and RMSNorm project onto the unit sphere.",
    source="one tutorial's geometry; another tutorial says radius √d",
    criterion=f"All outputs (float64, no eps, no gain) have length 1 to {EXACT:g}.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
