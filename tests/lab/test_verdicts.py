"""When rows give a verdict, and which rows."""

from __future__ import annotations

import dataclasses

import pytest

from normkit.lab.claim import Claim, Row, Verdict
from normkit.lab.executors import Inline
from normkit.lab.run import tasks_of
from normkit.lab.verdicts import decide
from tests.lab import claims_for_tests as made

CELLS = [{"a": a} for a in range(3)]


def measured(seeds: int = 3, quick: bool = False) -> tuple[Claim, list[Row]]:
    claim = dataclasses.replace(made.make(made.number, CELLS, seeds=3), kind="measured")
    return claim, list(Inline().run(tasks_of([claim], quick=quick, seeds=seeds)))


def test_all_rows_give_a_verdict_in_any_order() -> None:
    claim, rows = measured()
    decision = decide(claim, rows[::-1])
    assert decision.verdict is not None and decision.state == "holds" and not decision.quick
    assert [(r.cell["a"], r.seed) for r in decision.rows] == [(a, s) for a in range(3) for s in range(3)]


def test_no_rows_too_few_seeds_or_a_missing_row_give_none() -> None:
    claim, rows = measured()
    assert decide(claim, []).reason == "not measured yet"
    assert decide(claim, [r for r in rows if r.seed < 2]).reason == "2 of at least 3 seeds measured"
    assert decide(claim, rows[:-1]).reason == "1 of 9 measurements are missing"
    assert {decide(claim, part).state for part in ([], rows[:-1])} == {"no verdict"}


def test_more_seeds_than_asked_for_are_judged_once_complete() -> None:
    claim, rows = measured(seeds=5)
    assert decide(claim, rows).seeds == 5
    assert decide(claim, rows[:-1]).verdict is None


def test_a_failed_row_is_named() -> None:
    claim, rows = measured()
    failed = dataclasses.replace(rows[4], result={}, error="RuntimeError: no")
    decision = decide(claim, [*rows[:4], failed, *rows[5:]])
    assert decision.reason == "1 of 9 measurements failed; the first: RuntimeError: no"
    assert decision.failures == (failed,)


def test_the_full_form_counts_where_it_is_complete_else_the_quick_one() -> None:
    claim, full = measured()
    _, quick = measured(quick=True)
    assert decide(claim, [*quick, *full]).quick is False
    assert decide(claim, [*quick, *full[:-1]]).quick is True
    assert decide(claim, quick).quick is True


def test_rows_of_other_claims_and_of_settings_that_are_gone_do_not_count() -> None:
    claim, rows = measured()
    stray = [dataclasses.replace(rows[0], claim="other", result={"value": 500.0})]
    stray += [dataclasses.replace(rows[s], cell={"a": 99}, result={"value": 500.0}) for s in range(3)]
    decision = decide(claim, [*stray, *rows])
    assert decision.state == "holds" and len(decision.rows) == 9


def test_a_judge_that_raises_gives_no_verdict() -> None:
    claim, rows = measured()

    def judge(rows: list[Row]) -> Verdict:
        raise ZeroDivisionError("no spread")

    assert (
        decide(dataclasses.replace(claim, judge=judge), rows).reason == "its judge raised ZeroDivisionError: no spread"
    )


def test_an_outcome_is_one_of_four_and_measured_claims_have_three_seeds() -> None:
    with pytest.raises(ValueError, match="outcome must be one of"):
        Verdict("maybe", "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs seeds >= 3"):
        dataclasses.replace(measured()[0], seeds=2)
