"""Any spec through `bind` is what the reference says, whichever operator was chosen."""

from __future__ import annotations

import itertools

import pytest
import torch

from normkit import ops, spec
from normkit.reference import normalize
from tests.ops.test_rows import DTYPES, assert_same_bits_mostly, randn

SPECS = {
    **spec.NAMED,
    "two_dims": spec.TORCH_LAYER.replace(channel_dim=(-2, -1)),
    "groups": spec.MAMBA2_GATED.replace(groups=4),
    "sigmoid_before": spec.LLAMA.replace(gate=("sigmoid", "before"), output_dtype="input"),
    "plain_groups": spec.TORCH_RMS.replace(groups=4),
    "per_head": spec.LLAMA.replace(weight_shape="per_head", output_dtype="input"),
    "instance_affine": spec.TORCH_INSTANCE.replace(has_weight=True, has_bias=True),
    "layer_before": spec.TORCH_LAYER.replace(rounding="before_gain", has_bias=False),
    "batch_stats": spec.TORCH_BATCH.replace(running=None),
}


@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("name", SPECS)
def test_bind(name: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    s = SPECS[name]
    shape = (4, 32, 9) if s.channel_dim == 1 else (3, 5, 32)
    x = randn(*shape, dtype=x_dtype)
    features = {"features": (32,), "scalar": (1,), "per_head": (5, 32)}[s.weight_shape]
    if isinstance(s.channel_dim, tuple):
        features = shape[-2:]
    w = randn(*features, dtype=w_dtype, seed=1) if s.has_weight else None
    b = (
        randn(*(shape[-2:] if isinstance(s.channel_dim, tuple) else (32,)), dtype=w_dtype, seed=2)
        if s.has_bias
        else None
    )
    gate = randn(*shape, dtype=x_dtype, seed=3) if s.gate else None
    y, expected = ops.bind(s)(x, w, b, gate=gate), normalize(x, s, w, b, gate=gate)
    rounds = s.rounding == "before_gain"
    if rounds and y.element_size() > 2 and x_dtype.itemsize == 2:
        assert y.dtype == expected.dtype
        y, expected = y.to(x_dtype), expected.to(x_dtype)
    assert_same_bits_mostly(y, expected, rounds)
    if gate is None and s.channel_dim == -1:
        r = randn(*shape, dtype=x_dtype, seed=4)
        both = ops.add_and_norm(x, r, s, w, b)
        if both is not None:
            total = (x.to(torch.promote_types(x_dtype, torch.float32)) + r).to(x_dtype)
            assert torch.equal(both[1], total)
            assert_same_bits_mostly(both[0], normalize(total, s, w, b), rounds)
