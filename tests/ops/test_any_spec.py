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
# Twice the dtype's rounding for two places that round (before the gain and after it), and a sum in another order.
UNITS = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-20, torch.float64: 2**-48}


@given(
    spec=specs(running=None, frozen=False),
    seed=st.integers(0, 99),
    x_dtype=DTYPES,
    weight_dtype=DTYPES,
    bias_dtype=DTYPES,
    recorded=st.booleans(),
)
@settings(max_examples=400, deadline=None)
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


def test_a_bias_alone_promotes() -> None:
    spec = NormSpec(centered=False, has_weight=False, has_bias=True, output_dtype="promoted")
    y = F.norm(torch.randn(3, 12).bfloat16(), spec, bias=torch.randn(12))
    assert y.dtype == torch.float32


@pytest.mark.parametrize("output", ["promoted", "weight"])
def test_without_parameters_the_output_is_the_inputs(output: str) -> None:
    spec = NormSpec(has_weight=False, output_dtype=output)  # type: ignore[arg-type]
    assert F.norm(torch.randn(3, 12).half(), spec).dtype == torch.float16
