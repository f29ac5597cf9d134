"""Each rule broken once, both ways, is noticed: by the planted faults, by the pages' examples, by the clean models.

Run with ``pytest -m slow``: the tests that it runs are those of `test_planted` and `test_rules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from normkit.audit.result import Finding
from normkit.audit.rules import RULES
from normkit.audit.rules.registry import Evidence
from tests.audit import test_planted, test_rules

Check = Callable[[Evidence], Iterator[Finding]]


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def broken(monkeypatch: pytest.MonkeyPatch, rule: str, check: Check) -> None:
    monkeypatch.setitem(RULES, rule, dataclasses.replace(RULES[rule], check=check))


def always(rule: str) -> Check:
    finding = Finding(rule=rule, severity=RULES[rule].severity, where=("x",), message="said of everything", fix="none")
    return lambda _: iter((finding,))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_says_nothing_is_noticed(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, rule, lambda _: iter(()))
    with pytest.raises(AssertionError, match="is not caught"):
        test_planted.test_the_fault_is_caught(rule, tmp_path)
    _clean()
    with pytest.raises(ValueError, match="not enough values to unpack"):
        test_rules.test_the_pages_example_fires_and_its_fix_does_not(rule)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_says_it_of_everything_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, rule, always(rule))
    with pytest.raises(AssertionError):
        test_rules.test_the_pages_example_fires_and_its_fix_does_not(rule)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [r.id for r in RULES.values() if r.severity != "info" and not r.opt_in])
def test_a_false_alarm_is_noticed_on_a_clean_model(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, rule, always(rule))
    with pytest.raises(AssertionError):
        test_planted.test_a_clean_model_has_no_error_and_only_agreed_warnings("llama")


def _clean() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
