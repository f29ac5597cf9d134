"""The exact claims, measured and judged here, with plots of their rows."""

from __future__ import annotations

import pytest

from normkit.lab.claim import Claim
from normkit.lab.claims import all_claims
from normkit.lab.executors import Inline
from normkit.lab.report.figures import of_decision
from normkit.lab.run import tasks_of
from normkit.lab.verdicts import decide

# What arithmetic says, once and for all; a change here is a change of mathematics, of torch or of a model.
VERDICTS = {
    "batch-gradient": "holds",
    "eps-constant-row": "holds within limits",
    "eps-defaults": "holds within limits",
    "eps-half": "holds within limits",
    "fold-to-rms": "holds",
    "fp16-overflow": "holds within limits",
    "gain-cannot-shift": "wrong as stated",
    "gain-offset-decay": "holds",
    "group-limits": "holds within limits",
    "identity-affine": "holds within limits",
    "invariances": "holds",
    "model-table": "wrong as stated",
    "norm-counts": "holds",
    "normal-shape": "wrong as stated",
    "parameter-share": "holds",
    "pre-row-mean": "holds within limits",
    "projection": "holds",
    "rms-identity": "holds",
    "rms-needs-variance": "wrong as stated",
    "running-variance": "holds",
    "running-variance-seed": "wrong as stated",
    "sphere-radius": "wrong as stated",
    "std-outside": "holds",
    "variance-forms": "holds",
    "worked-example": "holds",
}
EXACT = [claim for claim in all_claims().values() if claim.kind == "exact"]


@pytest.mark.parametrize("claim", EXACT, ids=lambda c: c.id)
def test_an_exact_claim_is_decided(claim: Claim) -> None:
    rows = list(Inline().run(tasks_of([claim], quick=True)))
    assert [row.error for row in rows if row.error] == []
    decision = decide(claim, rows)
    assert decision.verdict is not None, decision.reason
    assert decision.verdict.outcome == VERDICTS[claim.id], decision.verdict.because
    assert "no plot" not in of_decision(decision)


def test_every_exact_claim_is_listed() -> None:
    assert {claim.id for claim in EXACT} == set(VERDICTS)
