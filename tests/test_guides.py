"""The examples in the guides run, and say what the guides say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def examples(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", ["report.md", "diff.md", "monitor.md"])
def test_the_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = examples(name)
    assert found
    for code in found:
        exec(code, {})
    printed = capsys.readouterr().out
    said = {
        "report.md": "residual branches: ",
        "diff.md": "agree and its outputs part",
        "monitor.md": "step 4: stream RMS",
    }
    assert said[name] in printed


def test_the_options_in_the_guide_exist() -> None:
    from typer.testing import CliRunner

    from normkit.cli import app

    text = re.sub(r"\s+", " ", CliRunner().invoke(app, ["audit", "--help"], env={"COLUMNS": "200"}).output)
    for option in re.findall(r"^\| `(--[\w-]+)", (DOCS / "report.md").read_text(), re.MULTILINE):
        assert option in text
