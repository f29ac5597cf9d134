"""The audit against further architectures, labelled by reading their code after the audit was written."""

from __future__ import annotations

import pytest
import torch

from normkit.audit import audit
from tests.audit.scramble import scramble
from tests.zoo import BROAD, MORE, Entry, build, score

QUICK = (
    "reformer", "xlstm", "zamba2", "dory", "mobilebert", "ctrl", "sew-d", "data2vec-audio", "fastspeech2_conformer",
    "siglip", "sam", "kosmos-2",
)  # fmt: skip
"""Those of the broad set that show most in least time; the rest is slow in all."""

BY_CLASS = ("lw_detr", "rf_detr", "uvdoc")
"""Their own code asks for the hidden states of a backbone by its class: they do not run under another name."""


def wrong(name: str, device: str = "cpu", scrambled: bool = False) -> list[str]:
    """What of an architecture's labels the audit does not say."""
    entry = build(name, device)
    if scrambled:
        scramble(entry.model)
        if not _runs(entry):
            pytest.skip("its own code asks for its classes' or attributes' names")
    return [f"{field}: {found}" for field, ok, found in score(entry, audit(entry.model, **entry.inputs)) if not ok]


def _runs(entry: Entry) -> bool:
    try:
        with torch.no_grad():
            entry.model(**entry.inputs)
    except (KeyError, TypeError):
        return False
    return True


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MORE)
def test_every_labelled_field(name: str, device: str) -> None:
    assert wrong(name, device) == []


@pytest.mark.parametrize("name", QUICK)
def test_a_broad_choice(name: str) -> None:
    assert wrong(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("scrambled", [False, True], ids=["names as they are", "every name scrambled"])
@pytest.mark.parametrize("name", [n for n in BROAD if n not in QUICK])
def test_the_rest_of_the_broad_set(name: str, scrambled: bool) -> None:
    if scrambled and name in BY_CLASS:
        pytest.skip("it does not run under other class names")
    assert wrong(name, scrambled=scrambled) == []
