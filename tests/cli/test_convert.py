"""``normkit convert`` as a user meets it: receipts, JSON, exit codes, and one clear line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from normkit.cli import app
from tests.cli.test_audit import refused
from tests.convert.checkpoints import digest, sharded, trained
from tests.convert.test_gains import gemma


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, args)])


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return gemma(tmp_path_factory.mktemp("baked") / "source", {"norm": "plain"}, family="gemma")


def test_gains(baked: Path, tmp_path: Path) -> None:
    before = digest(baked)
    result = run("gains", baked, tmp_path / "out", "--json", tmp_path / "receipt.json")
    assert result.exit_code == 0, result.output
    assert "5 changed, 0 left as they are" in result.stdout and "w to 1+w" in result.stdout
    assert "whole model against the original: outputs off by" in result.stdout
    assert "loaded as it is, the model is wrong" in " ".join(result.stdout.split())
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["conversion"] == "gains" and len(receipt["changed"]) == 5
    assert receipt["errors"]["original"]["outputs"] < 1e-5
    assert digest(baked) == before
    again = run("gains", tmp_path / "out", tmp_path / "again", "--no-probe", "--json", "-")
    assert again.exit_code == 0 and json.loads(again.stdout)["changed"] == []
    assert digest(tmp_path / "again") == digest(tmp_path / "out")


def test_dry_runs_write_nothing(baked: Path, tmp_path: Path) -> None:
    result = run("gains", baked, tmp_path / "out", "--dry-run", "--no-probe")
    assert result.exit_code == 0 and "5 changed" in result.stdout
    result = run("names", baked, "--from", "gemma", "--to", "gguf", "--keep-others", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "to blk.0.attn_norm.weight, gains +1" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_told(tmp_path: Path) -> None:
    between = 0.5 + 0.15 * torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    save_file({f"layers.{i}.norm.weight": v.clone() for i, v in enumerate(between)}, tmp_path / "a.safetensors")
    result = run("gains", tmp_path / "a.safetensors", tmp_path / "out", "--to", "w")
    assert result.exit_code == 1 and "cannot tell" in result.stdout and "nothing was written" in result.stdout
    assert not (tmp_path / "out").exists()
    result = run("gains", tmp_path / "a.safetensors", tmp_path / "out", "--to", "w", "--stored", "layers.*=1+w")
    assert result.exit_code == 0, result.output
    assert torch.equal(load_file(tmp_path / "out" / "a.safetensors")["layers.1.norm.weight"], between[1] + 1)
    result = run("gains", tmp_path / "a.safetensors", tmp_path / "left", "--to", "w", "--leave-unknown")
    assert result.exit_code == 0
    assert torch.equal(load_file(tmp_path / "left" / "a.safetensors")["layers.1.norm.weight"], between[1])


def test_names(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source", trained(24))
    (source / "config.json").write_text("{}")
    result = run("names", source, tmp_path / "out", "--from", "gemma", "--to", "llama", "--keep-others")
    assert result.exit_code == 0, result.output
    old, new = load_file(source / "model-00002-of-00002.safetensors"), tmp_path / "out"
    tensors = load_file(new / "model-00002-of-00002.safetensors")
    assert torch.equal(tensors["model.norm.weight"], old["model.norm.weight"] + 1)
    assert (new / "config.source.json").is_file() and not (new / "config.json").exists()
    index = json.loads((new / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.norm.weight"] == "model-00002-of-00002.safetensors"
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], old["model.layers.0.mlp.up_proj.weight"])


def test_whole_models_are_cut_and_joined(tmp_path: Path) -> None:
    """GPT-2's fused projections become three matrices, turned over, and come back bit for bit."""
    pytest.importorskip("transformers")
    from tests.residual.test_transformer_weights import theirs

    model = theirs("gpt2", layers=2)
    model.save_pretrained(tmp_path / "source")
    result = run("names", tmp_path / "source", tmp_path / "ours", "--from", "gpt2", "--to", "normkit")
    assert result.exit_code == 0, result.output
    assert "part 1 of 3, turned over" in result.stdout
    back = run("names", tmp_path / "ours", tmp_path / "back", "--from", "normkit", "--to", "gpt2", "--json", "-")
    assert back.exit_code == 0, back.output
    old, new = load_file(tmp_path / "source" / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert old.keys() == new.keys() and all(torch.equal(new[k], v) for k, v in old.items())
    assert any("3 joined, turned over" in change["what"] for change in json.loads(back.stdout)["changed"])


def test_tags_follow_their_tensors(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source", trained(24))
    assert run("gains", source, tmp_path / "plain", "--to", "w", "--no-probe").exit_code == 0
    message = refused(
        run("names", tmp_path / "plain", tmp_path / "no", "--from", "gemma", "--to", "gguf", "--keep-others")
    )
    assert "is tagged w, and gemma stores 1+w: convert its gains to 1+w first" in message
    result = run("names", tmp_path / "plain", tmp_path / "gguf", "--from", "llama", "--to", "gguf", "--keep-others")
    assert result.exit_code == 0, result.output
    again = run("gains", tmp_path / "gguf", tmp_path / "again", "--to", "w", "--json", "-")
    assert again.exit_code == 0 and json.loads(again.stdout)["changed"] == []


def test_refusals(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source", trained(24))
    out = tmp_path / "out"
    cases = [
        (("gains", tmp_path / "no", out), "no file or folder"),
        (("gains", source), "give the new folder as the second argument, or --dry-run"),
        (("gains", source, source, "--to", "w"), "is the source"),
        (("gains", source, tmp_path / "a" / "b", "--to", "w"), "does not exist; make it first"),
        (("gains", source, out, "--stored", "x=y"), "--stored must be PATTERN=w"),
        (("names", source, out), "say both namings"),
        (("names", source, out, "--from", "gemma", "--to", "mystery"), "no naming 'mystery'; known are llama"),
        (("names", source, out, "--from", "llama", "--to", "gpt2"), "norms of kind rms, gpt2 of kind layer"),
        (("names", source, out, "--from", "llama", "--to", "gguf"), "is no norm of llama and has no name in gguf"),
        (("names", source, out, "--from", "megatron", "--to", "llama"), "none of the 13 tensors"),
    ]
    for args, message in cases:
        assert message in refused(run(*args)), args
        assert not out.exists()
    bad = run("gains", source, out, "--to", "w", "--dry-run", "--json", tmp_path / "no" / "x.json")
    assert bad.exit_code == 2 and "cannot write" in bad.stderr and "Traceback" not in bad.output


def test_help_has_examples() -> None:
    for command in ("gains", "names", "fold", "recalibrate", "replace"):
        result = run(command, "--help")
        assert result.exit_code == 0 and f"Example: normkit convert {command}" in " ".join(result.stdout.split())


def test_help_is_wrapped_at_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a docstring do not break the text; examples keep lines of their own."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    lines = [line.strip() for line in run("fold", "--help").stdout.splitlines()]
    assert any(line.startswith("The model is loaded") and "Refused, with the reason" in line for line in lines)
    assert sum(line.startswith("Example: normkit convert fold") for line in lines) == 2


def test_replace(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from normkit.convert import load_replaced
    from tests.residual.test_transformer_weights import theirs

    theirs("gpt2", layers=2).save_pretrained(tmp_path / "source")
    before = digest(tmp_path / "source")
    dry = run("replace", tmp_path / "source", "--to", "rms_norm", "--dry-run", "--json", "-")
    assert dry.exit_code == 0 and len(json.loads(dry.stdout)["changed"]) == 5
    result = run("replace", tmp_path / "source", tmp_path / "out", "--to", "rms_norm", "--only", "transformer.ln_f")
    assert result.exit_code == 0, result.output
    assert "normkit.convert.load_replaced(" in result.stdout and "outputs off by" in result.stdout
    assert isinstance(load_replaced(tmp_path / "out").transformer.h[0].ln_1, torch.nn.LayerNorm)
    assert digest(tmp_path / "source") == before
    for args, message in (
        ((), "--to must be one of group_norm, "),
        (("--to", "pre"), "--to must be one of group_norm, "),
        (("--to", "group_norm"), "no norm can be replaced by 'group_norm'; nothing written"),
        (("--to", "rms_norm", "--only", "x"), "only names x; the norms are transformer."),
    ):
        assert message in refused(run("replace", tmp_path / "source", tmp_path / "no", *args))
    assert not (tmp_path / "no").exists()


def outputs(folder: Path, **inputs: torch.Tensor) -> torch.Tensor:
    from normkit.audit.load import load

    with torch.no_grad():
        return load(str(folder), device="cpu").model(**inputs)[0]


def test_fold(tmp_path: Path) -> None:
    """Loaded again by its config, the folded model gives the same outputs; its gains are 1."""
    pytest.importorskip("transformers")
    from tests.residual.test_transformer_weights import theirs

    theirs("llama", layers=2).save_pretrained(tmp_path / "source")
    before = digest(tmp_path / "source")
    result = run("fold", tmp_path / "source", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert digest(tmp_path / "source") == before
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    gains = [t for name, t in tensors.items() if "norm" in name]
    assert len(gains) == 5 and all(bool((g == 1).all()) for g in gains)
    ids = torch.arange(3, 20)[None]
    want, got = (outputs(tmp_path / name, input_ids=ids) for name in ("source", "out"))
    assert want.abs().max() > 1 and (got - want).abs().max() < 1e-5 * want.abs().max()
    again = run("fold", tmp_path / "source", "--dry-run", "--json", "-")
    assert again.exit_code == 0 and len(json.loads(again.stdout)["changed"]) == 5


def test_recalibrate(tmp_path: Path) -> None:
    """Every running mean becomes the mean over the data, and only buffers change."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1])
    torch.manual_seed(0)
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "source")
    images = torch.randn(3, 2, 3, 32, 32) + 0.5
    for n, batch in enumerate(images):
        save_file({"pixel_values": batch.clone()}, tmp_path / f"{n}.safetensors")
    given = [text for n in range(3) for text in ("--data", tmp_path / f"{n}.safetensors")]
    result = run("recalibrate", tmp_path / "source", tmp_path / "out", *given)
    assert result.exit_code == 0, result.output
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    assert old.keys() == new.keys()
    changed = [name for name in old if not torch.equal(old[name], new[name])]
    assert changed and all("running_" in name for name in changed)
    first = next(name for name in old if name.endswith("embedder.embedder.normalization.running_mean"))
    weight = old[first.replace("normalization.running_mean", "convolution.weight")]
    seen = torch.nn.functional.conv2d(images.flatten(0, 1), weight, stride=2, padding=weight.shape[-1] // 2)
    assert torch.allclose(new[first], seen.mean((0, 2, 3)), atol=1e-5)
    assert "--data must name .safetensors files; got none" in refused(
        run("recalibrate", tmp_path / "source", tmp_path / "no")
    )


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source", trained(24))
    assert "has no config.json" in refused(run("fold", source, tmp_path / "out"))
    (source / "config.json").write_text('{"model_type": "mystery"}')
    assert "the model type 'mystery'" in refused(run("fold", source, tmp_path / "out"))
    file = source / "model-00001-of-00002.safetensors"
    assert "is a file; give the folder" in refused(run("fold", file, tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
