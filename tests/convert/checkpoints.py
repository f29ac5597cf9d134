"""Small checkpoints for tests: sharded, with other files beside them, and their bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def sharded(folder: Path, shards: list[dict[str, Tensor]], **metadata: str) -> Path:
    """Shards with an index, a config and a file in a subfolder."""
    folder.mkdir(parents=True)
    places = {}
    for n, tensors in enumerate(shards, 1):
        name = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt", **metadata})
        places |= dict.fromkeys(tensors, name)
    total = sum(t.nbytes for tensors in shards for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text('{"tokens": []}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def trained(
    features: int, layers: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    """Two shards of a Llama-like decoder with zero-centred gains."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    first = {"model.embed_tokens.weight": random(37, features)}
    second = {"model.norm.weight": random(features) * 0.2, "steps": torch.tensor(7), "empty": torch.zeros(0, 3)}
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            first[f"model.layers.{layer}.{norm}.weight"] = random(features) * 0.2
        second[f"model.layers.{layer}.mlp.up_proj.weight"] = random(2 * features + 1, features)
    return [first, second]


def digest(folder: Path) -> dict[str, str]:
    """Every file's hash, by its relative name."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
