"""Conversions of model folders: tied heads, replaced norms, names with a measured difference; refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from normkit.convert import ConversionError, load_replaced
from normkit.convert.folder import fold_folder
from normkit.convert.rename import convert_names
from normkit.convert.replace import replace_folder
from tests.convert.checkpoints import digest
from tests.residual.test_transformer_weights import theirs

transformers = pytest.importorskip("transformers")
IDS = torch.arange(3, 20)[None]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS)[0]


def loaded(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def saved(folder: Path, name: str, **how: Any) -> nn.Module:
    model = theirs(name, layers=2)
    model.save_pretrained(folder, **how)
    return model


@pytest.mark.parametrize("shards", ["10GB", "40KB"], ids=["one-file", "sharded"])
@pytest.mark.parametrize("name", ["gpt2", "llama_tied_with_biases"])
def test_a_tied_head_gets_its_own_copy(name: str, shards: str, tmp_path: Path) -> None:
    """transformers loads the result as it is: two tensors, a config that says so, and the same logits."""
    model = saved(tmp_path / "source", name, max_shard_size=shards)
    before = digest(tmp_path / "source")
    refused = fold_folder(tmp_path / "source", None).refused
    assert any("--untie" in r.reason for r in refused)
    receipt = fold_folder(tmp_path / "source", tmp_path / "out", untie=True)
    assert digest(tmp_path / "source") == before
    assert not receipt.refused and any("was untied" in note for note in receipt.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    converted = loaded(tmp_path / "out")
    assert converted.get_input_embeddings().weight is not converted.get_output_embeddings().weight
    want = logits(model)
    assert want.abs().max() > 1 and (logits(converted) - want).abs().max() < 1e-5 * want.abs().max()
    gains = [p for n, p in converted.named_parameters() if ("norm" in n or "ln_" in n) and n.endswith("weight")]
    assert len(gains) == 5 and all(bool((g == 1).all()) for g in gains)


def test_a_config_that_ties_anyway_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose class ties its head whatever the config says: an untied file would load wrong."""
    saved(tmp_path / "source", "gpt2")
    original = transformers.GPT2LMHeadModel.__init__

    def tie(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.lm_head.weight = self.transformer.wte.weight

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "__init__", tie)
    with pytest.raises(ConversionError, match=r"would tie .* again on loading"):
        fold_folder(tmp_path / "source", tmp_path / "out", untie=True)
    assert not (tmp_path / "out").exists()


def test_what_the_files_lack(tmp_path: Path) -> None:
    """Random values stand in for what is missing: nothing is folded into them, and the receipt says so."""
    saved(tmp_path / "source", "llama")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"up_proj.weight' would be changed, and the files lack it"):
        fold_folder(tmp_path / "source", tmp_path / "out")
    save_file({**tensors, "model.layers.1.mlp.up_proj.weight": lost.bfloat16()}, file, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"the files hold it as BF16, and its model has it as F32"):
        fold_folder(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["rms_norm", "dynamic_tanh"])
def test_replaced_norms_are_loaded_again(to: str, tmp_path: Path) -> None:
    """The folder gives the very model that replacing in memory gives, ready to train; transformers does not load it."""
    from normkit.convert import replace

    model = saved(tmp_path / "source", "gpt2")
    receipt = replace_folder(tmp_path / "source", tmp_path / "out", to=to, alpha=0.7)
    assert len(receipt.changed) == 5 and receipt.errors is not None and receipt.errors.original.outputs > 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if "config" in p.name) == [
        "config.source.json", "generation_config.json",
    ]  # fmt: skip
    replace(model, input_ids=IDS, to=to, alpha=0.7)
    made = load_replaced(tmp_path / "out")
    assert torch.equal(logits(made), logits(model))
    assert made.lm_head.weight is made.transformer.wte.weight
    made.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in made.parameters())


def test_replaced_batch_norms(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1])
    torch.manual_seed(0)
    transformers.ResNetForImageClassification(config).bfloat16().save_pretrained(tmp_path / "source")
    receipt = replace_folder(tmp_path / "source", tmp_path / "out", to="group_norm", groups=4)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert receipt.changed and not any("running_" in name for name in tensors)
    model = load_replaced(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert model.training is False
    with pytest.raises(ConversionError, match=r"no norm can be replaced by 'rms_norm'; nothing written"):
        replace_folder(tmp_path / "source", tmp_path / "none", to="rms_norm")
    with pytest.raises(ConversionError, match="groups must be an integer >= 1"):
        replace_folder(tmp_path / "source", tmp_path / "none", to="group_norm", groups=0)
    assert not (tmp_path / "none").exists()
    only = receipt.changed[0].name
    receipt = replace_folder(tmp_path / "source", tmp_path / "one", to="group_norm", only=[only])
    assert [c.name for c in receipt.changed] == [only]
    assert sum(isinstance(m, nn.BatchNorm2d) for m in load_replaced(tmp_path / "one").modules()) > 1


def test_folders_that_were_not_replaced(tmp_path: Path) -> None:
    saved(tmp_path / "source", "gpt2")
    with pytest.raises(ConversionError, match=r"normkit.json cannot be read .*give a folder of normkit convert"):
        load_replaced(tmp_path / "source")
    replace_folder(tmp_path / "source", tmp_path / "out", to="rms_norm")
    recipe = tmp_path / "out" / "normkit.json"
    content = json.loads(recipe.read_text())
    recipe.write_text(json.dumps({"replace": {**content["replace"], "only": ["transformer.nothing"]}}))
    with pytest.raises(ConversionError, match=r"cannot be built again: only names transformer.nothing"):
        load_replaced(tmp_path / "out")
    recipe.write_text(json.dumps({"replace": {"to": "rms_norm"}}))
    with pytest.raises(ConversionError, match=r"has no recipe"):
        load_replaced(tmp_path / "out")


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "gpt2", "bert"])
def test_names_to_normkit_are_measured(name: str, tmp_path: Path) -> None:
    """Both ends run: the reference Transformer with the new names gives the source's outputs and gradients."""
    saved(tmp_path / "source", name)
    receipt = convert_names(tmp_path / "source", None, names=name, to="normkit", keep_others=name == "bert")
    assert receipt.errors is not None, receipt.notes
    found = receipt.errors.original
    assert found.outputs is not None and found.gradients is not None
    assert found.outputs < 1e-5 and found.gradients < 1e-4


def test_names_of_another_family_are_measured(tmp_path: Path) -> None:
    """Gemma's norms in a Llama compute the same; its embedding scale and activation do not come along, and it shows."""
    config = transformers.GemmaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GemmaForCausalLM(config).save_pretrained(tmp_path / "source")
    receipt = convert_names(tmp_path / "source", None, names="gemma", to="llama")
    assert receipt.errors is not None and receipt.errors.original.outputs > 1e-2
    assert any("whatever else the two families do differently" in note for note in receipt.notes)
    saved(tmp_path / "llama", "llama")
    same = convert_names(tmp_path / "llama", None, names="llama", to="llama")
    assert same.errors is not None and same.errors.original.outputs == 0 == same.errors.original.gradients


def test_names_that_cannot_be_measured(tmp_path: Path) -> None:
    """The receipt says why there is no measured difference."""

    def said(source: Path, **how: Any) -> str:
        receipt = convert_names(source, None, **how)
        assert receipt.errors is None
        return " ".join(receipt.notes)

    saved(tmp_path / "source", "llama")
    how = {"names": "llama", "to": "gguf", "keep_others": True}
    assert "not measured: no model can be built here that reads gguf's names" in said(tmp_path / "source", **how)
    assert "not measured" not in said(tmp_path / "source", **how, probe=False)
    (tmp_path / "source" / "config.json").unlink()
    assert "not measured: the source has no config.json" in said(tmp_path / "source", **how)
