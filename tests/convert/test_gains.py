"""Gain conventions told and converted: the labelled families, files stored the other way, overlap, mixed files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from normkit.convert import ConversionError
from normkit.convert.checkpoint import open_checkpoint
from normkit.convert.gain_evidence import score
from normkit.convert.gains import Gain, convert_gains, decide, detect_gains, what_the_config_reads
from tests.convert.checkpoints import digest, sharded, trained
from tests.zoo import ZOO

transformers = pytest.importorskip("transformers")

DRAWS = 8


def drawn(shape: tuple[int, ...], generator: torch.Generator, kind: str) -> Tensor:
    """Gains as training leaves them: log-normal, with outliers of which a fifth are negative.

    ``wide`` has middles from 0.05 (first layers of Llama) to 3, ``usual`` from 0.3 to 2, ``early`` stayed at 1.
    """

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=generator))

    middle, spread = {
        "wide": (math.exp(uniform(math.log(0.05), math.log(3.0))), math.exp(uniform(math.log(0.1), math.log(0.6)))),
        "usual": (math.exp(uniform(math.log(0.3), math.log(2.0))), uniform(0.1, 0.4)),
        "early": (1.0, 0.1),
    }[kind]
    gains = middle * torch.exp(spread * torch.randn(*shape, generator=generator))
    count = max(1, gains.numel() // 64)
    at = torch.randint(0, gains.numel(), (count,), generator=generator)
    signs = torch.where(torch.rand(count, generator=generator) < 0.2, -1.0, 1.0)
    gains.view(-1)[at] *= torch.exp(torch.randn(count, generator=generator)) * signs
    return gains


def saved(name: str, folder: Path) -> dict[str, int]:
    """One family's tiny model, saved as transformers saves it; its labelled gains by their names in the file."""
    data = ZOO[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(data["model_type"], **data["config"])
    model = getattr(transformers, data["auto_class"]).from_config(config)
    labels = {}
    for norm in data["norms"]:
        for module in norm["modules"] if norm["has_weight"] else ():
            weight = model.get_submodule(module).weight
            labels[len(labels)] = (weight, norm["weight_offset"])
            with torch.no_grad():
                weight.copy_(torch.full_like(weight, 1000.0 + len(labels)))  # to be known again in the file
    model.save_pretrained(folder)
    found = {}
    for key, stored in open_checkpoint(folder).tensors.items():
        value = stored.tensor().flatten() if stored.dtype == "F32" and stored.nbytes else torch.zeros(1)
        if value[0] > 1000 and bool((value == value[0]).all()):
            found[key] = labels[int(value[0]) - 1001][1]
    assert len(found) == len(labels)
    return found


@pytest.mark.parametrize("name", ZOO)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Never wrong, whichever way a file is stored; told in 95 of 100 cases where it is as the model reads it."""
    offsets = saved(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    reads = what_the_config_reads(checkpoint).norms
    assert {n: c for n, (c, _) in reads.items()} == {n: "1+w" if o else "w" for n, o in offsets.items()}
    told = total = 0
    for seed in range(DRAWS):
        for kind in ("wide", "usual", "early"):
            for swapped in (False, True):
                generator = torch.Generator().manual_seed(seed)
                gains = []
                for n, (convention, group) in reads.items():
                    stored = drawn(checkpoint.tensors[n].shape, generator, kind) - abs(offsets[n] - swapped)
                    gains.append(
                        Gain(name=n, score=score(stored), median=float(stored.median()), reads=convention, group=group)
                    )
                for gain in decide(gains):
                    want = "1+w" if offsets[gain.name] != swapped else "w"
                    assert gain.stored in (want, None), (kind, swapped, gain)
                    if not swapped:
                        told, total = told + (gain.stored is not None), total + 1
    assert told >= 0.95 * total, (told, total)


PLAIN = {
    "near 1": lambda r: 1 + 0.1 * r,
    "early layer of Llama": lambda r: 0.05 * torch.exp(0.6 * r),
    "small and tight": lambda r: 0.05 + 0.015 * r,
    "middling": lambda r: 0.4 * torch.exp(0.4 * r),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_gains_are_not_taken_for_centred_ones(kind: str) -> None:
    """A mean near 0 is no sign of 1+w where nothing crosses zero."""
    for seed in range(20):
        stored = PLAIN[kind](torch.randn(512, generator=torch.Generator().manual_seed(seed)))
        assert score(stored) > -2.3


def test_centred_gains_are_seen() -> None:
    for middle, spread in ((1.0, 0.05), (0.3, 0.3), (1.1, 0.3), (0.05, 0.5)):
        stored = middle * torch.exp(spread * torch.randn(512, generator=torch.Generator().manual_seed(3))) - 1
        assert score(stored) < -6


def test_starts_and_degenerate_values() -> None:
    assert score(torch.ones(8)) > 6 and score(torch.zeros(8)) < -6
    for values in (torch.full((8,), 3.0), torch.full((8,), math.nan), torch.empty(0), torch.tensor(2.0)):
        assert score(values) == 0
    noisy = torch.cat([1 + 0.05 * torch.randn(99), torch.tensor([math.nan, math.inf, -math.inf])])
    assert score(noisy) > 4


@pytest.mark.parametrize("reads", [None, "w", "1+w"])
def test_overlap_cannot_be_told(reads: Any) -> None:
    """Gains of 0.35 to 0.65, or of 1.35 to 1.65: both are usual."""
    generator = torch.Generator().manual_seed(0)
    stored = [0.5 + 0.15 * torch.randn(2048, generator=generator) for _ in range(2)]
    gains = [Gain(name=f"n{i}", score=score(s), median=0.5, reads=reads, group="n") for i, s in enumerate(stored)]
    for gain in decide(gains):
        assert gain.stored is None and gain.reason.startswith("cannot tell"), gain


def values(kind: str, features: int, seed: int) -> Tensor:
    noise = torch.randn(features, generator=torch.Generator().manual_seed(seed))
    return {"plain": 1 + 0.1 * noise, "centred": 0.1 * noise, "between": 0.5 + 0.15 * noise}[kind]


def gemma(folder: Path, kinds: dict[str, str], dtype: torch.dtype = torch.float32, family: str = "gemma2") -> Path:
    """A saved model whose norms are stored as asked; the first pattern in the name decides."""
    saved(family, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for seed, name in enumerate(sorted(tensors)):
        if "norm" in name:
            kind = next(k for pattern, k in kinds.items() if pattern in name)
            tensors[name] = values(kind, tensors[name].numel(), seed)
    save_file({n: t.to(dtype) for n, t in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def test_baked_gains_are_seen_and_unbaked(tmp_path: Path) -> None:
    """As a converter for another runtime leaves them: the +1 is in the file already, and the model adds it again."""
    source = gemma(tmp_path / "source", {"norm": "plain"})
    before = digest(source)
    receipt = convert_gains(source, tmp_path / "out")
    assert len(receipt.changed) == 9 and not receipt.refused
    assert digest(source) == before
    assert any("loaded as it is, the model is wrong" in note for note in receipt.notes)
    assert any("loads the old file as it is: outputs off by" in note for note in receipt.notes)
    assert receipt.errors is not None and receipt.errors.original.outputs is not None
    assert receipt.errors.original.outputs < 1e-5
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in old.items():
        assert torch.equal(new[name], tensor - 1 if "norm" in name else tensor), name
    again = convert_gains(tmp_path / "out", tmp_path / "again")
    assert again.changed == ()
    assert digest(tmp_path / "again") == digest(tmp_path / "out")


def test_there_and_back(tmp_path: Path) -> None:
    source = gemma(tmp_path / "source", {"norm": "centred"})
    plain = convert_gains(source, tmp_path / "plain", to="w", probe=False)
    assert len(plain.changed) == 9 and any("it is no reader of the new file" in n for n in plain.notes)
    assert all(g.tag == "w" and g.stored == "w" for g in detect_gains(tmp_path / "plain")[0])
    convert_gains(tmp_path / "plain", tmp_path / "back", probe=False)
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.allclose(new[n], t, atol=1e-7, rtol=0) for n, t in old.items())
    with safe_open(tmp_path / "back" / "model.safetensors", "pt") as file:
        assert set(json.loads(file.metadata()["normkit.gains"]).values()) == {"1+w"}
        assert file.metadata()["format"] == "pt"


def test_the_model_itself_agrees(tmp_path: Path) -> None:
    """Loaded by transformers, the repaired file gives the outputs that the old file's gains meant."""
    gemma(tmp_path / "right", {"norm": "centred"})
    convert_gains(tmp_path / "right", tmp_path / "baked", to="w", probe=False)
    for file in (tmp_path / "baked").glob("*.safetensors"):  # a foreign file has no tags
        save_file(load_file(file), file, metadata={"format": "pt"})
    convert_gains(tmp_path / "baked", tmp_path / "repaired", probe=False)
    ids = torch.arange(3, 15)[None]

    def logits(folder: str) -> Tensor:
        with torch.no_grad():
            return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)(ids).logits

    assert (logits("repaired") - logits("right")).abs().max() < 1e-5
    assert (logits("baked") - logits("right")).abs().max() > 1e-2


def test_a_mixed_file(tmp_path: Path) -> None:
    """Qwen3-Next keeps a plain gated norm beside 1+w norms."""
    config = transformers.AutoConfig.for_model(
        "qwen3_next", hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=99,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, decoder_sparse_step=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                gated = "linear_attn.norm" in name
                parameter.copy_((1.0 if gated else 0.0) + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "source")
    found, _ = detect_gains(tmp_path / "source")
    assert {g.name: g.stored for g in found} == {
        n: "w" if "linear_attn.norm" in n else "1+w"
        for n, p in model.named_parameters()
        if p.dim() == 1 and "norm" in n
    }
    receipt = convert_gains(tmp_path / "source", tmp_path / "out", to="w", probe=False)
    assert {c.name for c in receipt.changed} == {g.name for g in found if g.stored == "1+w"}


def test_a_half_converted_file(tmp_path: Path) -> None:
    """Layers stored in two ways under one name: nothing is claimed of those that go against the config."""
    source = gemma(tmp_path / "source", {"layers.0": "plain", "norm": "centred"})
    found, _ = detect_gains(source)
    for gain in found:
        assert gain.stored == (None if "layers.0" in gain.name else "1+w"), gain
    receipt = convert_gains(source, tmp_path / "out", to="w")
    assert len(receipt.refused) == 4 and not (tmp_path / "out").exists()
    assert any("nothing was written" in note for note in receipt.notes)
    receipt = convert_gains(source, tmp_path / "out", to="w", stored={"*.layers.0.*": "w"})
    assert not receipt.refused and {c.name for c in receipt.changed} == {g.name for g in found if g.stored == "1+w"}


def test_what_cannot_be_told_is_left_or_stated(tmp_path: Path) -> None:
    source = gemma(tmp_path / "source", {"norm": "between"})
    assert all(g.stored is None for g in detect_gains(source)[0])
    receipt = convert_gains(source, tmp_path / "out", to="w", leave_unknown=True, probe=False)
    assert receipt.changed == () and len(receipt.refused) == 9
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(new[n], t) for n, t in old.items())
    receipt = convert_gains(source, tmp_path / "stated", to="w", stored={"*": "config"}, probe=False)
    assert len(receipt.changed) == 9
    with pytest.raises(ConversionError, match="stored must say 'w', '1\\+w' or 'config'"):
        convert_gains(source, tmp_path / "no", to="w", stored={"*": "plain"})


def test_bfloat16_says_what_rounding_costs(tmp_path: Path) -> None:
    source = gemma(tmp_path / "source", {"norm": "centred"}, torch.bfloat16)
    receipt = convert_gains(source, tmp_path / "out", to="w")
    off = [float(m[1]) for c in receipt.changed if (m := re.search(r"off by (\S+)", c.what))]
    assert off and max(off) <= 2**-8
    assert receipt.errors is not None and receipt.errors.original.outputs is not None
    assert 0 < receipt.errors.original.outputs < 0.05
    new = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    assert new.dtype == torch.bfloat16


def test_without_a_model_values_alone_tell(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source", trained(64))
    (source / "config.json").unlink(missing_ok=True)
    found, notes = detect_gains(source)
    assert any("no config.json" in n for n in notes)
    assert [g.name for g in found] == [n for n in open_checkpoint(source).tensors if "norm" in n]
    assert {g.stored for g in found} == {"1+w"} and all("no config says" in g.reason for g in found)
    save_file({"w": torch.ones(2, 2)}, tmp_path / "matrices.safetensors")
    with pytest.raises(ConversionError, match="holds no norm's gain"):
        convert_gains(tmp_path / "matrices.safetensors", None)
    receipt = convert_gains(source, tmp_path / "out")
    assert {r.reason for r in receipt.refused} == {"no config says what a model reads"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "reads"),
    [
        ({"layernorm_zero_centered_gamma": True}, "1+w"),
        ({"layernorm_zero_centered_gamma": False}, "w"),
        ({"model": {"normalization": "layernorm1p"}}, "1+w"),
        ({"apply_layernorm_1p": True}, "1+w"),
    ],
)
def test_flags_of_megatron_and_nemo(config: dict[str, Any], reads: str, tmp_path: Path) -> None:
    tensors = {f"decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight": values("centred", 48, i) for i in range(4)}
    tensors["decoder.final_layernorm.weight"] = values("centred", 48, 9)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, _ = detect_gains(tmp_path)
    assert len(found) == 5 and {g.reads for g in found} == {reads}
    assert {g.stored for g in found} == {"1+w"}  # the values are clear, whatever the flag says


def test_a_wrong_tag_is_not_believed(tmp_path: Path) -> None:
    save_file(
        {"norm.weight": values("centred", 64, 0)},
        tmp_path / "a.safetensors",
        metadata={"normkit.gains": json.dumps({"norm.weight": "w"})},
    )
    found, _ = detect_gains(tmp_path / "a.safetensors")
    assert found[0].stored is None and "tagged w, but its values are those of 1+w" in found[0].reason
    save_file({"norm.weight": torch.ones(3)}, tmp_path / "b.safetensors", metadata={"normkit.gains": "[1"})
    with pytest.raises(ConversionError, match=r"b\.safetensors has metadata normkit\.gains that maps no names"):
        detect_gains(tmp_path / "b.safetensors")
