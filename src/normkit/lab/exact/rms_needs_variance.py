"""What RMSNorm needs to know of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, bars, holds_if, least, randn, worst
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    return [{"same": "variance"}, {"same": "second moment"}]


def measure(*, seed: int, same: str) -> dict[str, Any]:
    """Two rows that agree in one statistic and not in the other: by how much is each divided?"""
    a = randn(256, seed=seed)
    a = a - a.mean()
    b = a + 2.0
    if same == "second moment":
        b = b * (a.square().mean() / b.square().mean()).sqrt()
    spec = NormSpec(eps=0.0, has_weight=False, centered=False)
    divided = [(x[0] / norm(x, spec)[0]).item() for x in (a, b)]
    return {
        "divisors": divided,
        "variances": [x.var(unbiased=False).item() for x in (a, b)],
        "second_moments": [x.square().mean().item() for x in (a, b)],
        "differ": abs(divided[0] - divided[1]) / divided[0],
    }


def judge(rows: list[Row]) -> Verdict:
    by_variance = least([row for row in rows if row.cell["same"] == "variance"], "differ")
    by_moment = worst([row for row in rows if row.cell["same"] == "second moment"], "differ")
    return holds_if(
        by_variance <= EXACT,
        f"rows of the same variance are divided by numbers that differ by {by_variance:.2g}; rows of the same second "
        f"moment about zero by {'the same number' if by_moment <= EXACT else 'different numbers'} ({by_moment:.0e}), "
        "whatever their variance",
        **{"divisors differ, same variance": by_variance, "divisors differ, same second moment": by_moment},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    first = {row.cell["same"]: row.result for row in rows if row.seed == 0}
    names = [f"same {name}" for name in first]
    series = {
        f"{statistic} of row {k + 1}": [result[key][k] for result in first.values()]
        for statistic, key in (("variance", "variances"), ("divisor", "divisors"))
        for k in (0, 1)
    }
    bars(axes, names, series)


CLAIM = Claim(
    id="rms-needs-variance",
    kind="exact",
    statement="RMSNorm needs only the variance of a row.",
    source="one tutorial; another tutorial says that it needs no variance",
    criterion=f"Rows of equal variance are divided by equal numbers, to {EXACT:g}. What it does need is a statistic "
    "whose equality gives equal divisors.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
