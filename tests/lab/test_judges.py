"""Every judge, on made-up rows of every outcome that it can give."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from normkit.lab.claim import OUTCOMES, Claim, Row
from normkit.lab.claims import all_claims

MADE_UP: dict[str, list[tuple[str, list[Row]]]] = {}
for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
    if module.name.startswith("made_up"):
        MADE_UP |= importlib.import_module(f"tests.lab.{module.name}").MADE_UP
EXACT = [claim for claim in all_claims().values() if claim.kind == "exact"]
CASES = [(claim, outcome, rows) for claim in EXACT for outcome, rows in MADE_UP.get(claim.id, [])]


@pytest.mark.parametrize(
    ("claim", "outcome", "rows"), CASES, ids=[f"{c.id}-{o}-{n}" for n, (c, o, _) in enumerate(CASES)]
)
def test_a_judge_says_what_the_rows_say(claim: Claim, outcome: str, rows: list[Row]) -> None:
    verdict = claim.judge(rows)
    assert verdict.outcome == outcome
    assert verdict.because and "\n" not in verdict.because and not verdict.because.endswith(".")


def possible(claim: Claim) -> set[str]:
    """The outcomes that a judge's source names; `holds_if` stands for two."""
    tree = ast.parse(inspect.getsource(claim.judge))
    found = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in OUTCOMES}
    if any(isinstance(n, ast.Name) and n.id == "holds_if" for n in ast.walk(tree)):
        found |= {"holds", "wrong as stated"}
    return found


@pytest.mark.parametrize("claim", EXACT, ids=lambda c: c.id)
def test_every_side_of_a_judge_has_made_up_rows(claim: Claim) -> None:
    assert len(possible(claim)) >= 2
    assert {outcome for outcome, _ in MADE_UP[claim.id]} == possible(claim)


@pytest.mark.parametrize("claim", EXACT, ids=lambda c: c.id)
def test_a_judge_does_not_depend_on_the_order_of_rows(claim: Claim) -> None:
    for _, rows in MADE_UP[claim.id]:
        assert claim.judge(rows).outcome == claim.judge(rows[::-1]).outcome
