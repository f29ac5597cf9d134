"""The advise command: what it prints, reads and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from normkit.cli import app


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["advise", *args])


def test_each_choice_has_a_reason_its_source_and_what_would_change_it() -> None:
    found = run("decoder", "--depth", "24", "--dtype", "bfloat16")
    assert found.exit_code == 0
    for topic in ("norm", "placement", "qk-norm", "eps", "precision", "initialization", "warm-up", "weight decay"):
        assert f"{topic}: " in found.stdout
    assert found.stdout.count("why: ") == found.stdout.count("else: ") >= 8
    assert found.stdout.count("from: ") >= 8 and "import normkit" in found.stdout


def test_json_and_code_pipe(tmp_path: Path) -> None:
    data = json.loads(run("cnn", "--batch", "2", "--json", "-").stdout)
    assert data["spec"]["kind"] == "group" and data["choices"][0]["evidence"]
    compile(run("vit", "--code").stdout, "advice", "exec")
    assert run("rnn", "--json", str(tmp_path / "advice.json")).exit_code == 0
    assert json.loads((tmp_path / "advice.json").read_text())["form"] in ("cell", "none")


def test_own_results_decide(tmp_path: Path) -> None:
    own = tmp_path / "verdicts.json"
    for outcome, norm in (("holds", "RMSNorm"), ("wrong as stated", "LayerNorm")):
        verdict = {"outcome": outcome, "because": "mine", "numbers": {}}
        own.write_text(json.dumps({"verdicts": {"rms-quality": verdict}}))
        found = json.loads(run("decoder", "--results", str(own), "--json", "-").stdout)
        assert found["choices"][0]["value"] == norm
        assert found["choices"][0]["evidence"][0]["ref"] == "rms-quality"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["mlp"], "architecture must be one of decoder, encoder"),
        (["cnn", "--batch", "0"], "batch must be an integer >= 1"),
        (["cnn", "--batch", "1", "--norm", "batch"], "one sample"),
        (["decoder", "--task", "finetune"], "name their convention"),
        (["decoder", "--results", "nosuch.json"], "cannot read nosuch.json"),
        (["decoder", "--results", "pyproject.toml"], "does not hold the lab's verdicts"),
        (["decoder", "--json", "-", "--code"], "both write to standard output"),
        (["decoder", "--checkpoint", "gemma"], "name it"),
        (["decoder", "--json", "no/such/folder.json"], "No such file"),
    ],
)
def test_refusals_are_one_line(args: list[str], message: str) -> None:
    found = run(*args)
    assert found.exit_code == 2 and message in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_help_has_examples() -> None:
    assert "Example: normkit advise decoder" in run("--help").stdout
