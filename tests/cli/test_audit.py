"""``normkit audit`` as a user meets it: output, JSON, exit codes, and one clear line for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from normkit.cli import app

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}  # fmt: skip


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["audit", *args])


def refused(result: Result) -> str:
    """The one line that a refusal prints."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of model factories in the working directory."""
    name = "factories_for_test"
    (tmp_path / f"{name}.py").write_text(
        """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12)), torch.randn(3, 12)

def untouched():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), {"input": torch.randn(2, 3, 8, 8)}

def half_trained():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model[1].train()
    return model, torch.randn(2, 3, 8, 8)

def raising():
    raise RuntimeError("no weights today")

class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("this forward never works")

def broken():
    return Broken(), torch.randn(2, 3)

def lazy():
    import helper_for_test
    return nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(helper_for_test.WIDTH)), torch.randn(3, 12)

def number():
    return 7

def no_inputs():
    return nn.Linear(3, 3)
"""
    )
    (tmp_path / "helper_for_test.py").write_text("WIDTH = 12")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_folder_with_a_config(llama_folder: Path) -> None:
    result = run(str(llama_folder))
    assert result.exit_code == 0, result.output
    assert "model.layers.*.input_layernorm" in result.output
    assert "RMSNorm" in result.output


def test_json_to_a_file_and_to_standard_output(llama_folder: Path) -> None:
    target = llama_folder / "audit.json"
    assert run(str(llama_folder), "--json", str(target)).exit_code == 0
    written = json.loads(target.read_text())
    assert {"model", "norms", "branches", "findings"} <= set(written)
    assert {"name", "class", "kind", "placement", "calls", "functional", "reason", "eps"} <= set(written["norms"][0])
    printed = run(str(llama_folder), "--json", "-")
    assert json.loads(printed.stdout) == written


def test_all_shows_each_layer(llama_folder: Path) -> None:
    assert "model.layers.1.input_layernorm" in run(str(llama_folder), "--all").output


def test_weights_are_read(llama_folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(llama_folder))
    model.save_pretrained(llama_folder)
    result = run(str(llama_folder), "--json", "-")
    assert json.loads(result.stdout)["device"] == "cpu"


def test_a_factory_and_given_inputs(factories: str) -> None:
    assert run(f"{factories}:mlp").exit_code == 0
    result = run(f"{factories}:no_inputs", "--inputs", "input=4x3:float32")
    assert result.exit_code == 0, result.output


def test_a_factory_may_import_its_neighbours_when_called(factories: str) -> None:
    result = run(f"{factories}:lazy")
    assert result.exit_code == 0, result.output


def test_exit_codes_follow_the_findings(factories: str) -> None:
    assert run(f"{factories}:half_trained").exit_code == 1
    assert run(f"{factories}:half_trained", "--fail-on", "never").exit_code == 0
    assert run(f"{factories}:untouched").exit_code == 0
    assert run(f"{factories}:untouched", "--fail-on", "warning").exit_code == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("lama", "did you mean llama"),
        ("./nowhere", "no folder nowhere"),
        ("no_such_module:factory", "cannot import 'no_such_module'"),
        ("json:no_such_factory", "has no 'no_such_factory'"),
        ("FACTORIES:raising", "raised no weights today"),
        ("FACTORIES:number", "gave a int"),
        ("FACTORIES:no_inputs", "--inputs NAME=SHAPE:DTYPE"),
        ("FACTORIES:broken", "this forward never works"),
    ],
)
def test_a_model_that_cannot_be_had(target: str, said: str, factories: str) -> None:
    assert said in refused(run(target.replace("FACTORIES", factories)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "holds a list"),
        ('{"model_type": "llamma"}', "did you mean"),
        ("{}", 'no "model_type"'),
        ('{"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}', "remote code"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config"),
    ],
)
def test_a_config_that_cannot_be_used(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert said in refused(run(str(tmp_path)))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert "no config.json" in refused(run(str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not a safetensors file at all"])
def test_corrupt_weights(content: bytes, llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").write_bytes(content)
    assert "cannot read the weights" in refused(run(str(llama_folder)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("input_ids", "is not NAME=SHAPE:DTYPE"),
        ("input_ids=2x16:int63", "is not NAME=SHAPE:DTYPE"),
        ("missing.safetensors", "cannot read --inputs"),
        ("wrong_name=2x16:int64", "wrong_name"),
        ("input_ids=2x16:float32", "give inputs that fit"),
    ],
)
def test_inputs_that_do_not_fit(value: str, said: str, llama_folder: Path) -> None:
    assert said in refused(run(str(llama_folder), "--inputs", value))


def test_an_unknown_device(llama_folder: Path) -> None:
    assert "cpu or meta" in refused(run(str(llama_folder), "--device", "tpu"))


def test_an_unwritable_json(llama_folder: Path) -> None:
    assert "cannot write" in run(str(llama_folder), "--json", str(llama_folder / "no" / "such.json")).stderr


def test_no_colour_and_no_traceback_in_a_pipe(tmp_path: Path) -> None:
    env = os.environ | {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "normkit", "audit", str(tmp_path / "nowhere")]
    found = subprocess.run(command, capture_output=True, text=True, env=env)
    assert found.returncode == 2
    assert "\x1b[" not in found.stderr + found.stdout
    assert "Traceback" not in found.stderr


def test_help_has_an_example() -> None:
    assert "normkit audit minilm" in run("--help").output
