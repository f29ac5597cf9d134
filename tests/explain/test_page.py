"""docs/explain.md: its example runs, its shown output is what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normkit.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(code, "docs/explain.md", "exec"), {})
    assert (tmp_path / "sandwich.svg").stat().st_size > 0


def test_the_shown_output_is_printed() -> None:
    shown = re.findall(r"```\n(.*?)```", PAGE, re.S)[0]
    printed = CliRunner().invoke(app, ["explain", "rms", "1", "2", "3", "4"]).stdout
    assert [line.rstrip() for line in shown.splitlines()] == [
        line.rstrip() for line in printed.splitlines()[: len(shown.splitlines())]
    ]
