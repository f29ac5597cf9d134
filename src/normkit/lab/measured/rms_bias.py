"""RMSNorm with a bias and without: the validation loss of the same small language model."""

from __future__ import annotations

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.equivalence import CRITERION, cells_of, judge_equal, measure, plot

NORMS = ("rms", "rms with bias")


def cells(quick: bool) -> list[Cell]:
    """Two norms, all else equal."""
    return cells_of(NORMS, quick)


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    return judge_equal(rows, *NORMS)


CLAIM = Claim(
    id="rms-bias",
    kind="measured",
    statement="Adding a bias to RMSNorm makes no difference.",
    source="a tutorial's statement of the RMSNorm paper's finding",
    criterion=CRITERION,
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
    seeds=5,
)
