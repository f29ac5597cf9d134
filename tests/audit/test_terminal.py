"""What the table in the terminal says beside its rows."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from normkit.audit import Audit, audit
from normkit.audit.report.terminal import show


class Asks(nn.Module):
    """A model whose path depends on values, some times over."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 1 if x.sum() > 0 else x
        return self.norm(x)


@pytest.fixture(scope="module")
def guessed() -> Audit:
    return audit(Asks().to("meta"), torch.empty(2, 8, device="meta"))


def shown(result: Audit, every: bool = False) -> str:
    text = StringIO()
    show(result, Console(file=text, width=200, color_system=None), title="m", every=every)
    return text.getvalue()


def test_guessed_values_are_one_line(guessed: Audit) -> None:
    assert len(guessed.guesses) == 3
    text = shown(guessed)
    assert "note: 3 values were guessed, because meta tensors have none (--all lists them)" in text
    assert text.count("note:") == 1
    assert guessed.guesses[0] not in text


def test_all_lists_them(guessed: Audit) -> None:
    text = shown(guessed, every=True)
    assert guessed.guesses[0] in text
    assert "--all" not in text


def test_one_and_none_read_well(guessed: Audit) -> None:
    assert "1 value was guessed" in shown(replace(guessed, guesses=guessed.guesses[:1]))
    assert "note:" not in shown(replace(guessed, guesses=()))
    assert "note: x raised" in shown(replace(guessed, guesses=(), failures=("x raised ValueError",)))
