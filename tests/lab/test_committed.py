"""The committed report: every claim has a verdict, computed from the committed results, and advice rests on these."""

from __future__ import annotations

import json
from pathlib import Path

from normkit.lab.claims import all_claims
from normkit.lab.run import read
from normkit.lab.verdicts import COMMITTED, decide, to_json

FOLDER = Path(__file__).parents[2] / "docs" / "lab"
ROWS = read(FOLDER / "results.jsonl")


def test_every_claim_has_a_full_verdict() -> None:
    decisions = [decide(claim, ROWS) for claim in all_claims().values()]
    assert [(d.claim.id, d.reason) for d in decisions if d.verdict is None] == []
    assert [d.claim.id for d in decisions if d.quick] == []


def test_the_verdicts_are_what_the_judges_say_of_the_results() -> None:
    made = json.loads(to_json(decide(claim, ROWS) for claim in all_claims().values()))
    for path in (FOLDER / "verdicts.json", COMMITTED):
        assert json.loads(path.read_text(encoding="utf-8")) == made


def test_the_page_shows_each_verdict() -> None:
    page = (FOLDER / "report.md").read_text(encoding="utf-8")
    for claim in all_claims().values():
        verdict = decide(claim, ROWS).verdict
        assert claim.id in page and verdict is not None and verdict.outcome in page
