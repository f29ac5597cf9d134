"""Fused blocks against unfused ones, on one core and two: never slower, ratio reported (run with -s)."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import Tensor, nn

from normkit import NormSpec
from normkit.nn import build
from normkit.residual import Residual, ResidualStack

DIM, ROWS, BLOCKS = 1024, 128, 6
RMS = NormSpec(centered=False, eps=1e-6)


class Scale(nn.Module):
    """The cheapest sublayer, so that adds and norms are what is timed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((DIM,), 0.5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def stack(name: str, fuse: bool, dtype: torch.dtype, stream_dtype: torch.dtype | None) -> ResidualStack:
    blocks = [
        Residual(Scale(dtype), name, DIM, norm=RMS, fuse=fuse, dtype=dtype, stream_dtype=stream_dtype, depth=BLOCKS)
        for _ in range(BLOCKS)
    ]
    return ResidualStack(blocks, build(RMS, DIM, dtype=dtype))


@torch.no_grad()
def ratio(name: str, dtype: torch.dtype, stream_dtype: torch.dtype | None, repeats: int = 41) -> float:
    """Time fused over time unfused, the median over pairs of runs, so that a busy machine slows both."""
    x = torch.randn(ROWS, DIM, dtype=dtype)
    pair = [stack(name, fuse, dtype, stream_dtype) for fuse in (True, False)]
    ratios = []
    for n in range(repeats):
        taken = [0.0, 0.0]
        for i in (0, 1) if n % 2 else (1, 0):
            start = time.perf_counter()
            pair[i](x)
            taken[i] = time.perf_counter() - start
        ratios.append(taken[0] / taken[1])
    return statistics.median(ratios)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "stream_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)],
    ids=["float32", "bfloat16", "bfloat16_on_float32"],
)
@pytest.mark.parametrize("name", ["pre", "post", "sandwich"])
def test_never_slower(name, dtype, stream_dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = min(ratio(name, dtype, stream_dtype) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    print(f"{name:9} {dtype} stream {stream_dtype} {threads} threads: fused / unfused = {found:.3f}")
    assert found < 1.03  # 3 %: what the median still scatters
