"""The README's example runs, and its limits on itself hold."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from normkit.reference import normalize
from normkit.spec import GEMMA, LLAMA

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict[str, object] = {}
    exec(code, scope)
    found = scope["found"]
    assert found.kind == "layer"  # type: ignore[attr-defined]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_shown_output_is_what_is_printed() -> None:
    """Line for line, but for the folding of long findings."""
    from typer.testing import CliRunner

    from normkit.cli import app

    printed = " ".join(CliRunner().invoke(app, ["audit", "llama"]).stdout.split())
    (shown,) = re.findall(r"```\n(llama: .*?)```", README, re.DOTALL)
    for line in shown.split("findings:")[0].splitlines():
        assert " ".join(line.split()) in printed
    assert " ".join(shown[shown.index("findings:") :].split()) in printed


def test_the_cast_order_changes_about_a_quarter_of_bfloat16_outputs() -> None:
    """One rounding at the end (torch) against one before the gain as well (Llama), on a trained-like gain."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = (torch.rand(4096, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
    changed = normalize(x, LLAMA, weight) != normalize(x, GEMMA.replace(weight_offset=0.0), weight)
    assert 0.2 < changed.float().mean() < 0.3
