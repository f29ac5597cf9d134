"""``normkit audit PATH`` on weights as people keep them: shards, training checkpoints, GGUF; and on what is no such."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.cli.test_audit import LLAMA, refused, run
from tests.cli.test_audit_hostile import RunsACommand

GAIN = "model.layers.1.input_layernorm.weight"
MARK = 3.25
"""The value of one gain in every checkpoint here: an audit that has it has read the file."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found[GAIN].fill_(MARK)
    return found


def gains_of(path: Path, *args: str) -> dict[str, float]:
    """The median of every norm's gain, in a report that finds nothing wrong with the conventions."""
    result = run(str(path), "--json", "-", "--data", "inputs", "--select", "convention", *args)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["findings"] == []
    return {norm["name"]: norm["gain"]["median"] for norm in report["numbers"]["norms"]}


def lightning(weights: dict[str, Tensor]) -> dict[str, Any]:
    """What a Trainer writes, as far as it matters here; the real one is tried below."""
    return {
        "epoch": 1, "global_step": 2, "pytorch-lightning_version": "2.6",
        "state_dict": {f"net.{name}": tensor for name, tensor in weights.items()},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}],
        "hyper_parameters": {"width": 32},
    }  # fmt: skip


NESTED: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any]]] = {
    "a state dict": ("weights.pt", lambda w: w),
    "under model": ("weights.pth", lambda w: {"model": w, "step": 7}),
    "two deep": ("weights.bin", lambda w: {"state": {"model_state_dict": w}, "optimizer": {"m": torch.ones(4)}}),
    "data-parallel": ("weights.pt", lambda w: {f"module.{n}": t for n, t in w.items()}),
    "compiled": ("weights.pt", lambda w: {f"_orig_mod.{n}": t for n, t in w.items()}),
    "a block compiled": ("weights.pt", lambda w: {n.replace("rs.1", "rs.1._orig_mod"): t for n, t in w.items()}),
    "the base model alone": ("weights.pt", lambda w: {n.removeprefix("model."): t for n, t in w.items()}),
    "with an average behind": ("weights.pt", lambda w: {"model": w, "ema": {n: t * 0 for n, t in w.items()}}),
    "Lightning": ("last.ckpt", lightning),
}  # fmt: skip


@pytest.mark.parametrize("how", NESTED)
@pytest.mark.parametrize("named", ["file", "folder"])
def test_a_training_checkpoint(how: str, named: str, folder: Path, weights: dict[str, Tensor]) -> None:
    name, nest = NESTED[how]
    torch.save(nest(weights), folder / name)
    gains = gains_of(folder / name if named == "file" else folder)
    assert gains.pop(GAIN.removesuffix(".weight")) == pytest.approx(MARK)
    assert all(gain == pytest.approx(1) for gain in gains.values())


@pytest.mark.parametrize("legacy", [False, True])
def test_half_precision_and_old_formats(legacy: bool, folder: Path, weights: dict[str, Tensor]) -> None:
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    torch.save(half, folder / "weights.pt", _use_new_zipfile_serialization=not legacy)
    assert gains_of(folder / "weights.pt")[GAIN.removesuffix(".weight")] == pytest.approx(MARK)


def test_a_lightning_trainers_own_checkpoint(folder: Path, weights: dict[str, Tensor]) -> None:
    lightning = pytest.importorskip("lightning")
    import transformers

    class Lit(lightning.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
            self.net.load_state_dict(weights)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=0.0)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "barebones": False}
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, **quiet
    )
    trainer.fit(Lit(32), torch.utils.data.DataLoader(torch.randint(0, 99, (2, 6)), batch_size=2))
    trainer.save_checkpoint(folder / "lit.ckpt")
    assert gains_of(folder / "lit.ckpt")[GAIN.removesuffix(".weight")] == pytest.approx(MARK)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("lead", ["model", "consolidated"])
def test_shards(indexed: bool, lead: str, folder: Path, weights: dict[str, Tensor]) -> None:
    names = sorted(weights)
    files = {f"{lead}-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    index = folder / f"{lead}.safetensors.index.json"
    if indexed:
        index.write_text(
            json.dumps({"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}})
        )
    first = folder / next(iter(files))
    for path in (folder, first, *([index] if indexed else [])):
        assert gains_of(path)[GAIN.removesuffix(".weight")] == pytest.approx(MARK), path
    first.unlink()
    assert "shards" in refused(run(str(folder / list(files)[1])))


def test_a_file_on_meta_is_its_config(folder: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, folder / "weights.pt")
    result = run(str(folder / "weights.pt"), "--device", "meta", "--json", "-")
    assert json.loads(result.stdout)["device"] == "meta"


# ---- refusals ----


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.bin", "last.ckpt", "pytorch_model.bin"])
@pytest.mark.parametrize("where", ["beside", "instead", "legacy"])
def test_code_in_a_pickle_is_refused_and_not_run(
    name: str, where: str, folder: Path, tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    made = tmp_path / "made"
    if where == "instead":
        (folder / name).write_bytes(pickle.dumps(RunsACommand(made)))
    else:
        torch.save(weights | {"x": RunsACommand(made)}, folder / name, _use_new_zipfile_serialization=where != "legacy")
    for path in (folder, folder / name):
        assert "pickled code" in refused(run(str(path)))
    assert not made.exists()


def test_a_pickled_module_is_refused(folder: Path) -> None:
    torch.save(nn.LayerNorm(4), folder / "weights.pt")
    assert "pickled code (torch.nn.modules.normalization.LayerNorm)" in refused(run(str(folder)))


def test_a_program_is_refused(folder: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(3, 3)), folder / "weights.pt")
    assert "TorchScript" in refused(run(str(folder / "weights.pt")))


def saved(value: Any) -> bytes:
    target = io.BytesIO()
    torch.save(value, target)
    return target.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot read"),
        (b"\x80", "cannot read"),
        (b"PK\x03\x04 no archive", "cannot read"),
        (saved({"step": 3}), "no tensors"),
        (saved(["not", "a", "mapping"]), "no tensors"),
        (saved(torch.ones(3)), "holds no tensors by name"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".ckpt"])
def test_a_file_without_weights(content: bytes, said: str, suffix: str, folder: Path) -> None:
    (folder / f"weights{suffix}").write_bytes(content)
    assert said in refused(run(str(folder / f"weights{suffix}")))


def test_weights_of_another_model(folder: Path) -> None:
    torch.save({"encoder.weight": torch.ones(3, 3)}, folder / "weights.pt")
    said = refused(run(str(folder)))
    assert "none of its tensors fits" in said
    assert "encoder.weight" in said


def test_which_of_several(folder: Path, weights: dict[str, Tensor]) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        torch.save(weights, folder / name)
    assert "name the file" in refused(run(str(folder)))
    assert gains_of(folder / "b.ckpt")


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors", "weights.gguf"])
def test_no_such_file(name: str, folder: Path) -> None:
    assert "no file" in refused(run(str(folder / name)))


def test_no_config_beside(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, tmp_path / "weights.pt")
    assert "no config.json" in refused(run(str(tmp_path / "weights.pt")))


def test_a_file_of_another_kind(folder: Path) -> None:
    (folder / "notes.txt").write_text("nothing")
    assert "no file of weights that is known" in refused(run(str(folder / "notes.txt")))


# ---- GGUF ----


def write_gguf(path: Path, weights: dict[str, Tensor], architecture: str = "llama", eps: float = 3e-5) -> Path:
    gguf = pytest.importorskip("gguf")
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(LLAMA["hidden_size"])
    writer.add_block_count(LLAMA["num_hidden_layers"])
    writer.add_feed_forward_length(LLAMA["intermediate_size"])
    writer.add_head_count(LLAMA["num_attention_heads"])
    writer.add_head_count_kv(LLAMA["num_key_value_heads"])
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_vocab_size(LLAMA["vocab_size"])
    for name, tensor in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("named", ["file", "folder"])
def test_gguf(named: str, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights)
    target = path if named == "file" else tmp_path
    assert gains_of(target)[GAIN.removesuffix(".weight")] == pytest.approx(MARK)
    report = json.loads(run(str(target), "--json", "-").stdout)
    assert {norm["placement"] for norm in report["norms"]} == {"pre", "final"}
    assert all(norm["eps"] == pytest.approx(3e-5, rel=0.02) for norm in report["norms"])


def test_gguf_on_meta(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights)
    assert json.loads(run(str(path), "--device", "meta", "--json", "-").stdout)["device"] == "meta"


def test_gguf_of_an_unknown_architecture_says_what_it_holds(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    said = refused(run(str(write_gguf(tmp_path / "tiny.gguf", weights, architecture="unheard-of"))))
    for part in ("'unheard-of'", "eps 3e-05", "5 gains", "of means 1 to 3.25"):
        assert part in said


@pytest.mark.parametrize("cut", [0, 3, 30, 400])
def test_a_gguf_that_is_none_or_cut(cut: int, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights)
    path.write_bytes(path.read_bytes()[:cut])
    assert "cannot read" in refused(run(str(path)))
