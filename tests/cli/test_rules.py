"""``normkit rules``, and choosing rules on the command line and in the API."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import normkit
from normkit.audit.rules import RULES
from normkit.cli import app
from tests.cli.test_audit import LLAMA, refused
from tests.cli.test_audit import run as audit


def rules(*args: str) -> Result:
    return CliRunner().invoke(app, ["rules", *args])


def test_the_list_has_every_rule_with_its_severity() -> None:
    text = rules().stdout
    for rule in RULES.values():
        (line,) = [found for found in text.splitlines() if f" {rule.id} " in f" {found} "]
        assert rule.severity in line


def test_a_rule_is_explained_by_its_page() -> None:
    text = " ".join(rules("eps-vanishes").stdout.split())
    for part in ("adds its eps in float16", "How to fix", "normkit.audit(model"):
        assert part in text


def test_a_topic_lists_its_rules() -> None:
    found = json.loads(rules("precision", "--json").stdout)
    assert {r["id"] for r in found} == {r.id for r in RULES.values() if r.topic == "precision"}


def test_an_unknown_rule_is_one_line() -> None:
    result = rules("eps-vanish")
    assert result.exit_code == 2
    assert "eps-vanishes" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_select_and_ignore(llama: str) -> None:
    def found(*args: str) -> set[str]:
        return {f["rule"] for f in json.loads(audit(llama, "--json", "-", *args).stdout)["findings"]}

    assert found() == {"misleading-name"}
    assert found("--ignore", "misleading-name") == set()
    assert found("--ignore", "placement") == set()
    assert found("--select", "precision") == set()
    assert found("--select", "placement", "--select", "precision") == {"misleading-name"}


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_a_name_of_no_rule_is_refused_before_the_model_is_built(option: str) -> None:
    assert "did you mean misleading-name" in refused(audit("llama", option, "misleading-names"))


def test_ignoring_all_that_was_selected_runs_none(llama: str) -> None:
    result = audit(llama, "--select", "misleading-name", "--ignore", "placement", "--json", "-")
    assert json.loads(result.stdout)["findings"] == []


def test_speed_is_asked_for() -> None:
    result = audit("minilm", "--select", "convention", "--speed", "--json", "-", "--fail-on", "never")
    assert {f["rule"] for f in json.loads(result.stdout)["findings"]} <= {"slow-norm"}
    assert RULES["slow-norm"].opt_in


def faulty() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    nn.init.constant_(model[1].weight, float("nan"))
    return model


def test_assert_clean_raises_with_the_finding_and_its_fix() -> None:
    with pytest.raises(AssertionError, match=r"(?s)nonfinite-weights: 1: .*Fix: load the checkpoint again"):
        normkit.assert_clean(faulty(), torch.randn(2, 16))


def test_assert_clean_returns_the_audit_of_a_clean_model() -> None:
    result = normkit.assert_clean(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(2, 16))
    assert result["1"].kind == "layer"


def test_assert_clean_follows_its_severity_and_what_is_ignored() -> None:
    x = torch.randn(2, 16)
    normkit.assert_clean(faulty(), x, ignore=["nonfinite-weights"])
    chain = nn.ModuleDict({"first": nn.Linear(16, 16), "spare": nn.LayerNorm(16)})
    chain.forward = lambda x: chain["first"](x)  # type: ignore[method-assign]
    normkit.assert_clean(chain, x)
    with pytest.raises(AssertionError, match="norm-never-ran"):
        normkit.assert_clean(chain, x, fail_on="info")
    with pytest.raises(ValueError, match="fail_on must be one of info, warning, error"):
        normkit.assert_clean(chain, x, fail_on="fatal")  # type: ignore[arg-type]


def test_the_api_refuses_what_is_no_model_and_no_rule() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got int"):
        normkit.audit(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="select has 'nothing', which is no rule and no topic"):
        normkit.audit(nn.LayerNorm(4), torch.randn(2, 4), select=["nothing"])


def test_an_audit_prints_as_its_tables() -> None:
    text = str(normkit.audit(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(2, 16)))
    assert "LayerNorm" in text and "findings: none" in text and "\x1b" not in text


def test_a_models_argument_named_like_an_option_goes_by_position() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return self.norm(data)

    assert normkit.audit(Model(), torch.randn(2, 4))["norm"].kind == "layer"


REMOTE_CONFIG = """
import os
from transformers import PretrainedConfig
os.makedirs({marker!r}, exist_ok=True)
class RemoteConfig(PretrainedConfig):
    model_type = "remote-for-test"
    def __init__(self, width=16, **kwargs):
        self.width = width
        super().__init__(**kwargs)
"""
REMOTE_MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from .remote_config import RemoteConfig
class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed, self.norm = nn.Embedding(9, config.width), nn.LayerNorm(config.width)
        self.post_init()
    def forward(self, input_ids):
        return self.norm(self.embed(input_ids))
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A folder whose config names Python files, one of which leaves a mark when it is run."""
    folder, marker = tmp_path / "remote", tmp_path / "was_run"
    folder.mkdir()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = {
        "model_type": "remote-for-test",
        "vocab_size": 9,
        "auto_map": {"AutoConfig": "remote_config.RemoteConfig", "AutoModel": "remote_model.RemoteModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "remote_config.py").write_text(REMOTE_CONFIG.format(marker=str(marker)))
    (folder / "remote_model.py").write_text(REMOTE_MODEL)
    return str(folder), marker


def test_remote_code_is_refused(remote: tuple[str, Path]) -> None:
    folder, marker = remote
    assert "--trust-remote-code" in refused(audit(folder))
    assert not marker.exists()


def test_remote_code_runs_where_it_is_trusted(remote: tuple[str, Path]) -> None:
    folder, marker = remote
    result = audit(folder, "--trust-remote-code", "--inputs", "input_ids=2x5:int64", "--json", "-")
    assert result.exit_code == 0, result.output
    assert marker.exists() and os.path.isdir(marker)
    assert [n["name"] for n in json.loads(result.stdout)["norms"]] == ["norm"]


def test_missing_keys_are_an_error_in_the_report(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.0.input_layernorm.weight"]
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, file, {"format": "pt"})
    result = audit(str(tmp_path), "--json", "-")
    (finding,) = [f for f in json.loads(result.stdout)["findings"] if f["rule"] == "uninitialised-weights"]
    assert finding["where"] == ["model.layers.0.input_layernorm", "model.norm"]
    assert result.exit_code == 1
