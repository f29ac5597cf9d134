"""The audit against further architectures, labelled by reading their code after the audit was written."""

from __future__ import annotations

import pytest

from normkit.audit import audit
from tests.zoo import MORE, build, score


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MORE)
def test_every_labelled_field(name: str, device: str) -> None:
    entry = build(name, device)
    wrong = [f"{field}: {found}" for field, ok, found in score(entry, audit(entry.model, **entry.inputs)) if not ok]
    assert wrong == []
