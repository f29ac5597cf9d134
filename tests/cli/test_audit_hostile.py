"""``normkit audit`` given what it should refuse: code in weights, factories that exit, interrupts, odd configs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from normkit.cli import app
from tests.cli.test_audit import LLAMA, refused, run

FACTORIES = """
import sys
import torch
from torch import nn

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
    def forward(self, x):
        print("noise from the model")
        return self.norm(x)

def noisy():
    print("noise from the factory")
    return Noisy(), torch.randn(2, 4)

def exits():
    sys.exit(5)

class Exits(nn.Module):
    def forward(self, x):
        sys.exit(5)

def exits_in_forward():
    return Exits(), torch.randn(2, 4)

class Interrupted(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt

def interrupted():
    return Interrupted(), torch.randn(2, 4)
"""


class RunsACommand:
    """A pickle that would make a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "hostile_factories.py").write_text(FACTORIES)
    (tmp_path / "hostile_import.py").write_text("import sys; sys.exit(4)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hostile_factories", raising=False)
    return "hostile_factories"


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    return path


@pytest.mark.parametrize("whole_file", [True, False])
def test_pickled_code_is_not_run(tmp_path: Path, whole_file: bool) -> None:
    made = tmp_path / "made"
    where = folder(tmp_path / "model")
    weights = where / "pytorch_model.bin"
    if whole_file:
        weights.write_bytes(pickle.dumps(RunsACommand(made)))
    else:
        torch.save({"model.norm.weight": RunsACommand(made)}, weights)
    said = refused(run(str(where)))
    assert "pickled code" in said
    assert "weights_only=False" not in said
    assert not made.exists()


@pytest.mark.parametrize("name", ["factories:exits", "factories:exits_in_forward", "import:f"])
def test_an_exit_in_foreign_code_is_an_error_of_the_model(hostile: str, name: str) -> None:
    assert "SystemExit" in refused(run(f"hostile_{name}"))


def test_what_foreign_code_prints_is_not_in_the_json(hostile: str) -> None:
    printed = run(f"{hostile}:noisy", "--json", "-")
    assert json.loads(printed.stdout)["model"] == "Noisy"
    assert "noise from the model" in printed.stderr


def test_an_interrupt_ends_with_130_and_no_traceback(hostile: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "normkit.cli", "audit", f"{hostile}:interrupted"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("changes", [{"model_type": ["llama"]}, {"model_type": 3}, {"hidden_size": "big"}])
def test_a_config_with_wrong_types(tmp_path: Path, changes: dict[str, Any]) -> None:
    refused(run(str(folder(tmp_path / "model", **changes))))


def test_a_missing_shard_and_a_cut_file(tmp_path: Path) -> None:
    import transformers

    where = folder(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(where))
    model.save_pretrained(where, max_shard_size="20KB")
    shards = sorted(where.glob("model-*.safetensors"))
    shards[1].unlink()
    assert shards[1].name in refused(run(str(where)))
    whole = folder(tmp_path / "cut")
    model.save_pretrained(whole)
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "cannot read the weights" in refused(run(str(whole)))


def test_a_path_with_any_letters(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(folder(tmp_path / "ünï cödé 模"))])
    assert result.exit_code == 0, result.output


def test_two_outputs_in_one_place_are_refused(tmp_path: Path) -> None:
    where = folder(tmp_path / "model")
    assert "--json and --sarif both write to standard output" in refused(run(str(where), "--json", "-", "--sarif", "-"))
    out = str(tmp_path / "out")
    assert f"--json and --html both write to {out}" in refused(run(str(where), "--json", out, "--html", out))
    assert not Path(out).exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_said_with_the_files_name(tmp_path: Path) -> None:
    where = folder(tmp_path / "model")
    ended = run(str(where), "--html", "/dev/full")
    assert ended.exit_code == 2
    assert "cannot write /dev/full: No space left" in ended.stderr


def test_inputs_larger_than_memory(tmp_path: Path) -> None:
    where = folder(tmp_path / "model")
    for dtype in ("int64", "float32"):
        said = refused(run(str(where), "--inputs", f"input_ids={10**9}x{10**9}:{dtype}"))
        assert "more than memory holds" in said


def test_a_file_that_is_one_tensor(tmp_path: Path) -> None:
    where = folder(tmp_path / "model")
    torch.save(torch.ones(3), where / "one.pt")
    assert "one.pt holds no tensors by name" in refused(run(str(where / "one.pt")))


def test_an_index_without_its_parts(tmp_path: Path) -> None:
    where = folder(tmp_path / "model")
    (where / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "gone"}}')
    assert "KeyError: 'metadata'" in refused(run(str(where)))
