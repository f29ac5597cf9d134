"""The audit against 40 architectures labelled by reading their code."""

from __future__ import annotations

from collections import Counter

import pytest

from normkit.audit import audit
from tests.audit.scramble import scramble
from tests.zoo import FIELDS, ZOO, build, score

FIELDS_OF_THE_SCORE = (*FIELDS, "functional", "extra")


def _audit_all(scrambled: bool) -> tuple[Counter[str], Counter[str], list[str]]:
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    wrong: list[str] = []
    for name in ZOO:
        entry = build(name)
        if scrambled:
            scramble(entry.model)
        for field, ok, found in score(entry, audit(entry.model, **entry.inputs)):
            total[field] += 1
            right[field] += ok
            if not ok:
                wrong.append(f"{name} {field}: {found}")
    return right, total, wrong


def _table(title: str, right: Counter[str], total: Counter[str]) -> str:
    rows = [f"  {field:<14}{right[field]:>4} / {total[field]}" for field in FIELDS_OF_THE_SCORE]
    return "\n".join((f"\n{title}, {len(ZOO)} architectures", *rows))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scrambled", [False, True], ids=["names as they are", "every name scrambled"])
def test_score(scrambled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    right, total, wrong = _audit_all(scrambled)
    with capsys.disabled():
        print(_table("every name scrambled" if scrambled else "names as they are", right, total))
    assert wrong == []


def test_the_score_sees_faults() -> None:
    """A label that is wrong in every field is counted wrong in every field."""
    entry = build("llama")
    faults = {
        "kind": "layer", "centered": True, "eps": 1e-3, "weight_offset": 1, "has_weight": False, "has_bias": True,
        "cast_order": "torch_kernel", "placement": "qk", "calls": 7, "axes": "dim 1", "gated": "silu(gate) before",
    }  # fmt: skip
    entry.labels = [(label | faults, name, module) for label, name, module in entry.labels]
    missed = {field for field, ok, _ in score(entry, audit(entry.model, **entry.inputs)) if not ok}
    assert missed == set(FIELDS) - {"found"}
