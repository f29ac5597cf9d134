"""Whatever `functional.norm` picks for a spec, it is what the reference declares: dtype, layout and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normkit import functional as F
from normkit.reference import normalize
from normkit.spec import NormSpec
from tests.strategies import specs
from tests.test_reference import arguments

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
# Half of the draws from what has kernels, whose fields are few.
COVERED = {"running": None, "frozen": False, "statistic": "mean_square", "eps_at": "variance", "partial": 1.0}
SPECS = specs(running=None, frozen=False) | specs(**COVERED)
# Twice the dtype's rounding for two places that round (before the gain and after it), and a sum in another order.
UNITS = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-20, torch.float64: 2**-48}


@given(
    spec=SPECS,
    seed=st.integers(0, 99),
    x_dtype=DTYPES,
    weight_dtype=DTYPES,
    bias_dtype=DTYPES,
    recorded=st.booleans(),
)
@settings(max_examples=2000, deadline=None)
def test_functional_follows_the_reference(
    spec: NormSpec,
    seed: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    recorded: bool,
) -> None:
    spec = spec.replace(eps=max(spec.eps, 1e-6))  # a single centered value and no eps is 0 / 0
    x, weight, bias, gate = arguments(spec, seed)
    x = x.to(x_dtype).requires_grad_(recorded)
    weight = None if weight is None else weight.to(weight_dtype)
    bias = None if bias is None else bias.to(bias_dtype)
    gate = None if gate is None else gate.to(x_dtype)
    found, wanted = F.norm(x, spec, weight, bias, gate=gate), normalize(x, spec, weight, bias, gate=gate)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    narrow = max((x_dtype, wanted.dtype), key=lambda d: torch.finfo(d).eps)
    unit = UNITS[narrow]
    scale = wanted.double().abs().max().item()
    torch.testing.assert_close(found.double(), wanted.double(), rtol=unit, atol=unit * scale)
    with torch.no_grad():
        out = torch.full_like(found, float("nan"))
        assert F.norm(x, spec, weight, bias, gate=gate, out=out) is out
        torch.testing.assert_close(out.double(), wanted.double(), rtol=unit, atol=unit * scale)


def test_a_bias_alone_promotes() -> None:
    spec = NormSpec(centered=False, has_weight=False, has_bias=True, output_dtype="promoted")
    y = F.norm(torch.randn(3, 12).bfloat16(), spec, bias=torch.randn(12))
    assert y.dtype == torch.float32


@pytest.mark.parametrize("output", ["promoted", "weight"])
def test_without_parameters_the_output_is_the_inputs(output: str) -> None:
    spec = NormSpec(has_weight=False, output_dtype=output)  # type: ignore[arg-type]
    assert F.norm(torch.randn(3, 12).half(), spec).dtype == torch.float16


@given(spec=SPECS, seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.float64]), masked=st.booleans())
@settings(max_examples=600, deadline=None)
def test_gradients_follow_the_reference(spec: NormSpec, seed: int, dtype: torch.dtype, masked: bool) -> None:
    # A spread near zero has a gradient that no tolerance fits: none is divided by less than 0.03 here.
    spec = spec.replace(eps=max(spec.eps, 1e-3 if spec.eps_at == "variance" else 1e-3**0.5))
    given_tensors = [None if t is None else t.to(dtype) for t in arguments(spec, seed)]
    x = given_tensors[0]
    assert x is not None
    mask = None
    if masked and spec.axes != "features":
        channel = spec.channel_dim % x.dim()  # type: ignore[operator]
        shape = [n for d, n in enumerate(x.shape) if d != channel]
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.3
    results = []
    for call in (F.norm, normalize):
        tensors = [None if t is None else t.clone().requires_grad_() for t in given_tensors]
        y = call(tensors[0], spec, tensors[1], tensors[2], gate=tensors[3], mask=mask)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        y.backward(upstream.to(y.dtype))
        results.append([t.grad for t in tensors if t is not None])
    unit = UNITS[dtype] * 16  # sums over all positions, and 1 / eps at a small spread
    for found, wanted in zip(*results, strict=True):
        assert found is not None
        assert wanted is not None
        # At least a unit of the terms that are summed: the gradient of two centered values is the difference of equals.
        torch.testing.assert_close(found, wanted, rtol=unit, atol=unit * max(1.0, wanted.abs().max().item()))


@given(spec=SPECS, seed=st.integers(0, 99), x_dtype=DTYPES, stream_dtype=DTYPES)
@settings(max_examples=400, deadline=None)
def test_residual_sums_follow_the_reference(
    spec: NormSpec, seed: int, x_dtype: torch.dtype, stream_dtype: torch.dtype
) -> None:
    spec = spec.replace(eps=max(spec.eps, 1e-6))
    x, weight, bias, gate = arguments(spec, seed)
    x, stream = x.to(x_dtype), arguments(spec, seed + 1)[0].to(stream_dtype)
    gate = None if gate is None else gate.to(x_dtype)
    y, total = F.norm(x, spec, weight, bias, gate=gate, residual=stream)
    assert torch.equal(total, (x + stream).to(stream_dtype))
    wanted = normalize(total, spec, weight, bias, gate=gate)
    assert y.dtype == (x_dtype if spec.output_dtype == "input" else wanted.dtype)
    unit = max(UNITS[x_dtype], UNITS[stream_dtype])
    scale = wanted.double().abs().max().item()
    torch.testing.assert_close(y.double(), wanted.double(), rtol=unit, atol=unit * scale)
