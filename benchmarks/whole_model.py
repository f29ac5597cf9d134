"""A Llama-shaped model with its own norms and with normkit's: prefill, decode and a training step, interleaved.

Run: python benchmarks/whole_model.py                       4 layers of 2048, float32 and bfloat16
     python benchmarks/whole_model.py --dtypes float32 --layers 8 --prefill 1024 --decode 8
     python benchmarks/whole_model.py --layers 1 --hidden 256 --prefill 64 --train 64 --half-train 4 --rounds 1

On a processor without bfloat16 instructions torch multiplies bfloat16 matrices in a training step with a plain loop
that is hundreds of times slower than in float32, norms or not. There --half-train says how many tokens that step has;
0 leaves it out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import normkit
from normkit.bench.results import environment

SHAPE = {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
HEAD = "| what | own norms, s | normkit, s | ratio | norms' share before | after |\n| - | - | - | - | - | - |"


def build(layers: int, hidden: int, dtype: torch.dtype) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama", num_hidden_layers=layers, hidden_size=hidden, max_position_embeddings=8192, **SHAPE
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Mark(torch.autograd.Function):
    """The identity, which calls ``reached`` when the gradient comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reached: Callable[[], None]) -> torch.Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.reached()
        return grad, None


@contextmanager
def timed(norms: list[nn.Module]) -> Iterator[list[float]]:
    """Adds up the seconds that are spent in norm modules, forward and backward.

    A backward lasts from the gradient of a norm's output to that of its input, all on one thread. Backward hooks of
    modules would not do: a swapped norm that gets one runs its own forward again.
    """
    spent, started = [0.0], [0.0]

    def enter() -> None:
        started[0] = time.perf_counter()

    def leave() -> None:
        spent[0] += time.perf_counter() - started[0]

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        marked = (Mark.apply(args[0], leave), *args[1:])
        enter()
        return marked

    def after(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        leave()
        return Mark.apply(result, enter)

    handles = [h for m in norms for h in (m.register_forward_pre_hook(before), m.register_forward_hook(after))]
    yield spent
    for handle in handles:
        handle.remove()


def share(norms: list[nn.Module], call: Callable[[], Any]) -> float:
    """The norms' share of one call."""
    with timed(norms) as spent:
        begun = time.perf_counter()
        call()
        return spent[0] / (time.perf_counter() - begun)


def calls_of(model: nn.Module, prefill: int, decode: int, train: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, max(prefill, train)))

    @torch.no_grad()
    def forward() -> None:
        model(input_ids=ids[:, :prefill], use_cache=False)

    @torch.no_grad()
    def steps() -> None:
        nonlocal cache
        for _ in range(decode):
            cache = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
        cache.crop(-decode)

    def step() -> None:
        model(input_ids=ids[:, :train], labels=ids[:, :train], use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    with torch.no_grad():
        cache = model(input_ids=ids[:, :prefill], use_cache=True).past_key_values
    calls = {f"forward, {prefill} tokens": forward, f"decode, {decode} after {prefill}": steps}
    return {**calls, f"training step, {train} tokens": step} if train else calls


def measure(dtype: str, options: argparse.Namespace) -> None:
    """Print one dtype's rows."""
    model = build(options.layers, options.hidden, getattr(torch, dtype))
    old = {m: type(m) for m in model.modules()}
    sample = torch.randint(0, SHAPE["vocab_size"], (1, 32))
    receipt = normkit.swap(model, input_ids=sample, use_cache=False, rounds=0, gradients=False, only_faster=False)
    new = {m: type(m) for m in model.modules()}
    norms = [m for m, kind in new.items() if kind is not old[m]]
    print(f"\n{dtype}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {len(norms)} norms swapped, "
          f"{len(receipt.skipped)} left\n\n{HEAD}", flush=True)  # fmt: skip

    def become(types: dict[nn.Module, type]) -> None:
        for module in norms:
            module.__class__ = types[module]

    train = options.train if dtype == "float32" else options.half_train
    for name, call in calls_of(model, options.prefill, options.decode, train).items():
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
            shares.append(share(norms, call))
        before, after = (statistics.median(seconds[k]) for k in ("before", "after"))
        print(f"| {name} | {before:.3g} | {after:.3g} | {before / after:.3f} | {shares[0]:.1%} | {shares[1]:.1%} |",
              flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 4, "hidden": 2048, "prefill": 2048, "decode": 1, "train": 512, "half-train": 16, "rounds": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    for key, value in environment().items():
        print(f"{key}: {value}")
    print(f"threads: {torch.get_num_threads()}")
    for dtype in options.dtypes:
        measure(dtype, options)


if __name__ == "__main__":
    main()
