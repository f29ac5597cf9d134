"""The audit against further architectures, labelled by reading their code after the audit was written."""

from __future__ import annotations

import pytest
import torch

from normkit.audit import audit
from tests.audit.scramble import scramble
from tests.zoo import BROAD, MORE, build, score

QUICK = (
    "reformer", "xlstm", "zamba2", "dory", "mobilebert", "ctrl", "sew-d", "data2vec-audio", "fastspeech2_conformer",
    "siglip", "sam", "kosmos-2",
)  # fmt: skip
"""Those of the broad set that show most in least time; the rest is slow in all."""

OWN_NAMES = (
    "clipseg", "depth_anything", "fastspeech2_conformer_pre", "llava", "lw_detr", "rf_detr", "segformer", "uvdoc",
)  # fmt: skip
"""Their own code asks for hidden states by a class's name, or for a buffer by its own: renamed, they do not run."""


def wrong(name: str, device: str = "cpu", scrambled: bool = False) -> list[str]:
    """What of an architecture's labels the audit does not say."""
    entry = build(name, device)
    if scrambled:
        scramble(entry.model)
    return [f"{field}: {found}" for field, ok, found in score(entry, audit(entry.model, **entry.inputs)) if not ok]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MORE)
def test_every_labelled_field(name: str, device: str) -> None:
    assert wrong(name, device) == []


@pytest.mark.parametrize("name", QUICK)
def test_a_broad_choice(name: str) -> None:
    assert wrong(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in BROAD if n not in QUICK])
def test_the_rest_of_the_broad_set(name: str) -> None:
    assert wrong(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in BROAD if n not in (*QUICK, *OWN_NAMES)])
def test_the_broad_set_with_every_name_scrambled(name: str) -> None:
    assert wrong(name, scrambled=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_NAMES)
def test_those_left_out_run_under_their_own_names_alone(name: str) -> None:
    entry = build(name)
    scramble(entry.model)
    with pytest.raises((KeyError, TypeError)), torch.no_grad():
        entry.model(**entry.inputs)
