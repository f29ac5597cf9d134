"""``normkit swap``: a printed receipt, JSON, and one line for what cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from normkit.cli import app

FACTORIES = """
import torch
from torch import nn

def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12)).eval(), torch.randn(3, 12)

def image():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), {"input": torch.randn(2, 3, 8, 8)}

class Restless(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.LayerNorm(8), [0]

    def forward(self, x):
        self.calls[0] += 1
        return self.norm(x) * len(COUNT)

def restless():
    model = Restless()
    model.register_forward_hook(lambda *_: COUNT.append(0))
    return model, torch.randn(3, 8)

COUNT = [0]
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "swap_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "swap_factories"


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["swap", *args])


def test_the_receipt_is_printed(factories: str, tmp_path: Path) -> None:
    result = run(f"{factories}:mlp", "--slower", "--json", str(tmp_path / "receipt.json"))
    assert result.exit_code == 0, result.output
    assert "1 changed, 0 left" in result.stdout and "LayerNorm" in result.stdout
    assert "whole model against the original" in result.stdout
    read = json.loads((tmp_path / "receipt.json").read_text())
    assert [c["name"] for c in read["changed"]] == ["1"]


def test_json_alone_on_standard_output(factories: str) -> None:
    result = run(f"{factories}:image", "--slower", "--train", "--dtype", "bfloat16", "--json", "-")
    read = json.loads(result.stdout)
    assert read["changed"][0]["what"] == "BatchNorm on batch statistics, rounded once"


def test_a_model_that_gives_other_numbers_each_time_is_not_proven(factories: str) -> None:
    result = run(f"{factories}:restless", "--slower")
    assert result.exit_code == 1
    assert "is allowed" in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("args", [("nothing:here",), ("llama", "--inputs", "x=2,3"), ("./no_such_folder",)])
def test_what_cannot_be_had_is_one_line(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert len([line for line in result.stderr.splitlines() if line.strip()]) == 1
