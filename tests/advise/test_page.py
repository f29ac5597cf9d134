"""docs/advise.md: its example runs, its commands answer."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normkit.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "advise.md").read_text()
COMMANDS = re.findall(r"^    normkit (advise .*)$", PAGE, re.M)


def test_the_python_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/advise.md", "exec"), {})
    assert "GroupNorm" in printed.getvalue() and "an existing checkpoint fixes its placement" in printed.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_answer(command: str) -> None:
    assert CliRunner().invoke(app, shlex.split(command, comments=True)).exit_code == 0
