"""Peak memory of a conversion against the largest tensor, on a 2 GB sharded checkpoint made in a temporary folder.

    python benchmarks/convert_stream.py [--gigabytes 2] [--folder /tmp]

The checkpoint is Llama-shaped bfloat16 with zero-centred gains and no config; every gain is converted to w. Memory is
the growth of the process's peak resident set (VmHWM, reset before the run) over the largest tensor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

CONVERT = """
import sys, time
from normkit.convert.gains import convert_gains

def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) * 1024

small, big, out = sys.argv[1:]
convert_gains(small, out + "-small", to="w", probe=False)  # what the first use costs is no part of the figure
open("/proc/self/clear_refs", "w").write("5")
before, start = peak(), time.perf_counter()
receipt = convert_gains(big, out, to="w", probe=False)
print(peak() - before, time.perf_counter() - start, len(receipt.changed), len(receipt.refused))
"""


def make(folder: Path, *, layers: int, hidden: int, vocabulary: int, per_shard: int) -> tuple[int, int]:
    """Write the shards one at a time; (bytes of the largest tensor, bytes in all)."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int) -> torch.Tensor:
        return torch.randn(rows, hidden, generator=generator).mul_(0.02).bfloat16()

    def gain() -> torch.Tensor:
        return torch.randn(hidden, generator=generator).mul_(0.2).bfloat16()

    shards = -(-layers // per_shard)
    places: dict[str, str] = {}
    largest = total = 0
    for shard in range(shards):
        tensors = {} if shard else {"model.embed_tokens.weight": matrix(vocabulary), "model.norm.weight": gain()}
        for layer in range(shard * per_shard, min(layers, (shard + 1) * per_shard)):
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = gain()
            for name, rows in (("self_attn.qkv", 3 * hidden), ("self_attn.o", hidden), ("mlp.up", 4 * hidden)):
                tensors[f"model.layers.{layer}.{name}.weight"] = matrix(rows)
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        largest = max(largest, *(t.nbytes for t in tensors.values()))
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return largest, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        hidden = 2048
        vocabulary = 32000
        layers = max(1, round((options.gigabytes * 1e9 - vocabulary * hidden * 2) / (8 * hidden * hidden * 2)))
        make(folder / "small", layers=2, hidden=64, vocabulary=100, per_shard=1)
        largest, total = make(folder / "big", layers=layers, hidden=hidden, vocabulary=vocabulary, per_shard=6)
        paths = (str(folder / name) for name in ("small", "big", "out"))
        run = subprocess.run([sys.executable, "-c", CONVERT, *paths], capture_output=True, text=True, check=True)
        grown, seconds, changed, refused = run.stdout.split()
        began = time.perf_counter()
        subprocess.run(["cp", "-r", folder / "big", folder / "copy"], check=True)
        subprocess.run(["sync", "-f", folder / "copy"], check=True)
        copy = time.perf_counter() - began
    print(f"{total / 1e9:.2f} GB in {-(-layers // 6)} shards, largest tensor {largest / 1e6:.0f} MB")
    print(f"{changed} gains converted, {refused} refused")
    print(f"peak memory grew by {int(grown) / 1e6:.0f} MB: {int(grown) / largest:.2f} of the largest tensor")
    print(f"{float(seconds):.1f} s; cp -r and sync of the same files {copy:.1f} s")


if __name__ == "__main__":
    main()
