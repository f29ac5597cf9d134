"""The examples of docs/fold.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from normkit.convert.replace import TARGETS

PAGE = (Path(__file__).parents[2] / "docs" / "fold.md").read_text()


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    torch.manual_seed(0)
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)


def test_every_target_is_named() -> None:
    assert all(f'`"{target}"`' in PAGE for target in TARGETS)
