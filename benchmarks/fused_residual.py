"""What a decoder could gain at most if every residual sum were fused into the norm behind it.

A swapped norm and the sum before it as two calls against one, at the shapes that prefill and decode have, and the time
saved over all of a model's sums as a share of the model's own forward (swapped), in interleaved rounds.

Run: python benchmarks/fused_residual.py
     python benchmarks/fused_residual.py --dtype float32 --layers 4
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from whole_model import SHAPE, build

import normkit
from normkit.bench.results import environment
from normkit.convert.swap.fuse import add_norm
from normkit.convert.timing import interleave


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 2), ("hidden", 2048), ("prefill", 1024), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    for key, value in environment().items():
        print(f"{key}: {value}")
    model = build(options.layers, options.hidden, dtype)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, options.prefill))
    normkit.swap(model, input_ids=ids[:, :64], use_cache=False, rounds=0, gradients=False, only_faster=False)
    norm = model.model.norm
    for tokens in (options.prefill, 1):
        stream, branch = (torch.randn(1, tokens, options.hidden).to(dtype) for _ in range(2))

        def apart(stream: Any = stream, branch: Any = branch) -> Any:
            total = stream + branch
            return norm(total), total

        def fused(stream: Any = stream, branch: Any = branch) -> Any:
            return add_norm(stream, branch, norm)

        def whole(tokens: int = tokens) -> Any:
            return model.model(input_ids=ids[:, :tokens], use_cache=False)

        calls: list[Callable[[], Any]] = [apart, fused, whole]
        two, one, forward = (statistics.median(s) for s in interleave(calls, options.rounds))
        saved = 2 * options.layers * (two - one) / forward
        print(
            f"{tokens} tokens: sum and norm {two * 1e6:.1f} us, fused {one * 1e6:.1f} us ({two / one:.2f}x); "
            f"all {2 * options.layers} of a forward of {forward * 1e3:.1f} ms: {saved:.2%} saved"
        )


if __name__ == "__main__":
    main()
