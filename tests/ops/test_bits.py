"""The same bits whatever surrounds a row: other rows, threads, runs, and (but for subnormals) the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from normkit import ops
from tests.ops.test_rows import DTYPES, randn

pytestmark = pytest.mark.skipif(not ops.LOADED, reason=ops.report().reason)


def everything(dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs and gradients of every operator, on fixed inputs."""
    results = []
    x, r, g = (randn(300, 257, dtype=dtype, seed=s) for s in range(3))
    w, b = randn(257, dtype=dtype, seed=3), randn(257, dtype=dtype, seed=4)
    leaves = [t.clone().requires_grad_() for t in (x, r, w, b)]
    x, r, w, b = leaves
    for y in (
        ops.rms_norm(x, w), ops.layer_norm(x, w, b), *ops.add_rms_norm(x, r, w), *ops.add_layer_norm(x, r, w, b),
        ops.gated_rms_norm(x, r, w), ops.gated_rms_norm(x, r, w, gate_before=True, round_before_gain=True),
    ):  # fmt: skip
        grads = torch.autograd.grad(y, leaves, g, allow_unused=True, retain_graph=True)
        results += [y.detach(), *(d for d in grads if d is not None)]
    for layout in (torch.contiguous_format, torch.channels_last):
        v = randn(5, 24, 13, 11, dtype=dtype, seed=5).contiguous(memory_format=layout)
        gv = randn(5, 24, 13, 11, dtype=dtype, seed=6).contiguous(memory_format=layout)
        mask = randn(5, 13, 11, seed=7) > -0.5
        leaves = [v.requires_grad_(), *(randn(24, dtype=dtype, seed=s).requires_grad_() for s in (8, 9))]
        mean, var = randn(24, seed=10), randn(24, seed=11).abs() + 0.5
        for y in (
            ops.group_norm(*leaves, 6), ops.instance_norm(*leaves), ops.batch_norm_train(*leaves)[0],
            ops.batch_norm_train(*leaves, mask)[0], ops.batch_norm(v, mean, var, *leaves[1:]),
            ops.channel_layer_norm(*leaves),
        ):  # fmt: skip
            results += [y.detach(), *torch.autograd.grad(y, leaves, gv)]
    return results


@pytest.fixture
def restore_threads() -> Iterator[None]:
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_runs(dtype: torch.dtype, restore_threads: None) -> None:
    torch.set_num_threads(1)
    expected = everything(dtype)
    for threads in (1, 2, 3, 16):
        torch.set_num_threads(threads)
        for a, b in zip(everything(dtype), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 64, 1000, 5000])
def test_one_row_or_many(dtype: torch.dtype, size: int) -> None:
    x, r, w = randn(256, size, dtype=dtype), randn(256, size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    for f in (
        lambda x, r: ops.rms_norm(x, w), lambda x, r: ops.layer_norm(x, w, w),
        lambda x, r: ops.add_rms_norm(x, r, w)[0], lambda x, r: ops.gated_rms_norm(x, r, w),
    ):  # fmt: skip
        many = f(x, r)
        for i in (0, 100, 255):
            assert torch.equal(f(x[i : i + 1], r[i : i + 1]), many[i : i + 1])


def digest() -> str:
    import hashlib

    h = hashlib.sha256()
    for dtype in DTYPES:
        for t in everything(dtype):
            h.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16")


@pytest.mark.parametrize("level", LEVELS)
def test_instruction_sets_agree(level: str) -> None:
    """Vectors have one logical width and nothing is contracted, so that every level adds in the same order."""
    current = ops.report().instruction_set
    if current not in LEVELS or LEVELS.index(level) > LEVELS.index(current):
        pytest.skip(f"this processor has no {level}")
    code = (
        "from normkit import ops; from tests.ops.test_bits import digest; print(ops.report().instruction_set, digest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NORMKIT_ISA": level},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [level, digest()]
