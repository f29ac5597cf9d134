"""What `normkit.Monitor` costs: a training step measured, watched between measurements, and plain, interleaved.

Run: python benchmarks/monitor.py [rounds]

Each round times one plain step, one with the monitor on but not due, and one that is measured, on the same model and
batch. The overhead at an interval is (median of measured - plain) / interval, plus that of the steps between.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import normkit
from normkit.audit.monitor.monitor import EVERY

SIZES = {
    "4 layers, 256 wide, 4x64 tokens": (4, 256, 4, 64),
    "8 layers, 256 wide, 8x128 tokens": (8, 256, 8, 128),
    "4 layers, 512 wide, 2x256 tokens": (4, 512, 2, 256),
}


def build(layers: int, width: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=1000,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(layers: int, width: int, batch: int, length: int, rounds: int) -> dict[str, float]:
    """Median seconds of each kind of step."""
    model = build(layers, width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(0, 1000, (batch, length))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    monitor = normkit.Monitor(model, every=10**9, sink=lambda *_: None)
    times: dict[str, list[float]] = {"plain": [], "watched": [], "measured": []}
    with monitor:
        step()  # audits the model, once
    for number in range(rounds + 1):
        found = {"plain": timed(step)}
        with monitor:
            monitor.step = 1
            found["watched"] = timed(step)
            monitor.step = 0

            def measured() -> None:
                step()
                monitor.flush()

            found["measured"] = timed(measured)
        if number:  # the first round warms up
            for kind, seconds in found.items():
                times[kind].append(seconds)
    return {kind: statistics.median(values) for kind, values in times.items()}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, {rounds} rounds")
    print(f"{'model':34} {'plain ms':>9} {'watched':>8} {'measured':>9}  overhead at every = 100, {EVERY}, 1000")
    for name, size in SIZES.items():
        found = measure(*size, rounds)
        plain = found["plain"]
        ratios = {kind: seconds / plain for kind, seconds in found.items()}
        shares = [
            (ratios["measured"] - 1) / every + max(0.0, ratios["watched"] - 1) * (every - 1) / every
            for every in (100, EVERY, 1000)
        ]
        print(
            f"{name:34} {plain * 1e3:9.1f} {ratios['watched']:7.3f}x {ratios['measured']:8.2f}x  "
            + ", ".join(f"{share:.2%}" for share in shares),
            flush=True,
        )


if __name__ == "__main__":
    main()
