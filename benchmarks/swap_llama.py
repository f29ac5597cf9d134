"""A Llama-shaped model before and after a swap: prefill, decode and a training step, in interleaved rounds.

Run: python benchmarks/swap_llama.py --dtype float32
     python benchmarks/swap_llama.py --train 0                               bfloat16, without the training step
     python benchmarks/swap_llama.py --layers 2 --prefill 256 --rounds 3     a short run

In bfloat16 on a processor without bfloat16 instructions, torch's backward of a linear layer runs in a plain loop that
is hundreds of times slower than in float32: a training step takes most of an hour there, norms or not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import normkit
from normkit.bench.harness import environment

SHAPE = {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}


def build(layers: int, hidden: int, dtype: torch.dtype) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama", num_hidden_layers=layers, hidden_size=hidden, max_position_embeddings=4096, **SHAPE
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def in_norms(norms: list[nn.Module], call: Callable[[], Any]) -> float:
    """The share of a call that is spent in norm modules (forward only)."""
    spent, started = [0.0], [0.0]

    def enter(*_: Any) -> None:
        started[0] = time.perf_counter()

    def leave(*_: Any) -> None:
        spent[0] += time.perf_counter() - started[0]

    handles = [h for m in norms for h in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    begun = time.perf_counter()
    call()
    total = time.perf_counter() - begun
    for handle in handles:
        handle.remove()
    return spent[0] / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("layers", 8),
        ("hidden", 2048),
        ("prefill", 1024),
        ("train", 512),
        ("decode", 8),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    model = build(options.layers, options.hidden, getattr(torch, options.dtype))
    ids = torch.randint(0, SHAPE["vocab_size"], (1, options.prefill))
    for key, value in environment().items():
        print(f"{key}: {value}")
    print(f"threads: {torch.get_num_threads()}; {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters")
    old = {m: type(m) for m in model.modules()}
    receipt = normkit.swap(model, input_ids=ids[:, :64], use_cache=False, rounds=0, gradients=False)
    receipt.show()
    parts = dict(model.named_modules())
    norms = [parts[n] for n in (*receipt.swapped, *(r.name for r in receipt.skipped)) if n in parts]
    new = {m: type(m) for m in model.modules()}

    def become(types: dict[nn.Module, type]) -> None:
        for module, kind in types.items():
            if type(module) is not kind:
                module.__class__ = kind

    @torch.no_grad()
    def prefill() -> None:
        model(input_ids=ids, use_cache=False)

    @torch.no_grad()
    def decode() -> None:
        nonlocal cache
        for _ in range(options.decode):
            cache = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
        cache.crop(options.prefill)

    def train() -> None:
        batch = ids[:, : options.train]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    calls: dict[str, Callable[[], None]] = {
        f"prefill, {options.prefill} tokens": prefill,
        f"decode, {options.decode} tokens after {options.prefill}": decode,
    }
    if options.train:
        calls[f"training step, {options.train} tokens"] = train
    print(
        "\n| what | before, s | after, s | ratio | norms' share before (forward) | after |\n| - | - | - | - | - | - |"
    )
    for name, call in calls.items():
        seconds: dict[str, list[float]] = {"before": [], "after": []}
        for turn in range(options.rounds + 1):
            order = [("before", old), ("after", new)]
            for when, types in order if turn % 2 else reversed(order):
                become(types)
                started = time.perf_counter()
                call()
                if turn:  # the first warms up
                    seconds[when].append(time.perf_counter() - started)
        shares = []
        for types in (old, new):
            become(types)
            shares.append(in_norms(norms, call))
        before, after = (statistics.median(seconds[k]) for k in ("before", "after"))
        print(
            f"| {name} | {before:.3g} | {after:.3g} | {before / after:.3f} | {shares[0]:.1%} | {shares[1]:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
