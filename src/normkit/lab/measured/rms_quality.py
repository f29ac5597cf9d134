"""RMSNorm against LayerNorm: the validation loss of the same small language model."""

from __future__ import annotations

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.equivalence import CRITERION, cells_of, judge_equal, measure, plot

NORMS = ("layer", "rms")


def cells(quick: bool) -> list[Cell]:
    """Two norms, all else equal."""
    return cells_of(NORMS, quick)


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    return judge_equal(rows, *NORMS)


CLAIM = Claim(
    id="rms-quality",
    kind="measured",
    statement="RMSNorm's quality matches LayerNorm's.",
    source="Zhang and Sennrich 2019, arXiv:1910.07467, and tutorials",
    criterion=CRITERION,
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=5,
)
