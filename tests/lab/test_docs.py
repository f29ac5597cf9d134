"""The page about the lab: its example is a file that can be compared, and its options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import normkit
from normkit.cli import app
from normkit.lab.claim import OUTCOMES
from normkit.lab.register import find_norm, find_placement

PAGE = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()


def test_the_example_is_a_norm_and_a_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_norms.py").write_text(code.replace('"max-norm"', '"max-norm-of-the-page"'))
    monkeypatch.chdir(tmp_path)
    x = torch.randn(2, 3, 8)
    for name in ("max-norm-of-the-page", "MaxNorm"):
        assert find_norm(f"my_norms.py:{name}")(8)(x).abs().amax() == 1
    assert isinstance(find_placement("my_norms.py:damped"), normkit.Placement)


def test_every_option_on_the_page_exists() -> None:
    shown = re.findall(r"^    normkit lab (\w+)(.*)$", PAGE, re.MULTILINE)
    assert len(shown) >= 8
    for command, rest in shown:
        helped = CliRunner().invoke(app, ["lab", command, "--help"]).stdout
        for option in re.findall(r"--[a-z]+", rest.split("#")[0]):
            assert option in helped, (command, option)


def test_every_verdict_is_explained() -> None:
    assert all(f"| {outcome} |" in PAGE for outcome in (*OUTCOMES, "no verdict"))
