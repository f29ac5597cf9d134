"""reference.normalize against the definition, element by element, and its corners."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from normkit import spec as S
from normkit.reference import count_elements, normalize, statistics
from normkit.spec import NormSpec, partial_count
from tests.strategies import specs


def _owner(index: tuple[int, ...], shape: tuple[int, ...], spec: NormSpec) -> tuple[object, ...]:
    """Which statistic an element belongs to, from the words of the definition."""
    if isinstance(spec.channel_dim, tuple):
        return index[: len(shape) - len(spec.channel_dim)]
    channel = spec.channel_dim % len(shape)
    part = index[channel] // (shape[channel] // spec.groups)
    position = tuple(i for d, i in enumerate(index) if d != channel)
    return {
        "features": (position, part),
        "batch": (index[channel],),
        "instance": (index[0], index[channel]),
        "group": (index[0], part),
    }[spec.axes]


def straight_line(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None) -> Tensor:
    """The definition in Python floats, one element at a time."""
    shape = tuple(x.shape)
    features = len(spec.channel_dim) if isinstance(spec.channel_dim, tuple) else 1

    def at(parameter: Tensor, index: tuple[int, ...]) -> float:
        if parameter.numel() == 1:
            return parameter.item()
        if isinstance(spec.channel_dim, tuple):
            return parameter[index[-features:]].item()
        if parameter.dim() > 1:
            return parameter[index[-parameter.dim() :]].item()
        return parameter[index[spec.channel_dim % len(shape)]].item()

    def activation(value: float) -> float:
        sigmoid = 1 / (1 + math.exp(-value))
        assert spec.gate is not None
        return value * sigmoid if spec.gate[0] == "silu" else sigmoid

    indices = list(itertools.product(*map(range, shape)))
    values = {i: x[i].item() for i in indices}
    if gate is not None and spec.gate is not None and spec.gate[1] == "before":
        values = {i: v * activation(gate[i].item()) for i, v in values.items()}
    sets: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for i in indices:
        sets.setdefault(_owner(i, shape, spec), []).append(i)
    y = torch.empty(shape, dtype=torch.float64)
    for members in sets.values():
        counted = members
        if spec.partial < 1:
            assert isinstance(spec.channel_dim, int)
            channel = spec.channel_dim % len(shape)
            counted = [i for i in members if i[channel] < partial_count(spec.partial, shape[channel])]
        n = len(counted)
        c = math.fsum(values[i] for i in counted) / n if spec.centered else 0.0
        s = math.fsum((values[i] - c) ** 2 for i in counted)
        s = {"mean_square": s / n, "unbiased": s / max(n - 1, 1), "sum": s}[spec.statistic]
        root = {
            "variance": math.sqrt(s + spec.eps),
            "std": math.sqrt(s) + spec.eps,
            "floor": max(math.sqrt(s), spec.eps),
        }[spec.eps_at]
        for i in members:
            value = (values[i] - c) / root
            if weight is not None:
                value *= spec.weight_offset + at(weight, i)
            if bias is not None:
                value += at(bias, i)
            if gate is not None and spec.gate is not None and spec.gate[1] == "after":
                value *= activation(gate[i].item())
            y[i] = value
    return y


def arguments(spec: NormSpec, seed: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Trained-like float64 arguments of a size that is no power of two."""
    g = torch.Generator().manual_seed(seed)
    channels = 6
    shape = (3, channels, 5) if spec.channel_dim == 1 else (2, 3, 5, channels)
    x = torch.randn(shape, generator=g, dtype=torch.float64) * 1.7 + 0.4
    features = shape[-len(spec.channel_dim) :] if isinstance(spec.channel_dim, tuple) else (channels,)
    weight_shape = {"features": features, "scalar": (1,), "per_head": (5, channels)}[spec.weight_shape]
    weight = torch.rand(weight_shape, generator=g, dtype=torch.float64) + 0.5 if spec.has_weight else None
    bias = torch.randn(features, generator=g, dtype=torch.float64) * 0.1 if spec.has_bias else None
    gate = torch.randn(shape, generator=g, dtype=torch.float64) if spec.gate is not None else None
    return x, weight, bias, gate


@given(spec=specs(running=None, frozen=False), seed=st.integers(0, 2**16))
@settings(max_examples=150, deadline=None)
def test_float64_follows_the_definition(spec: NormSpec, seed: int) -> None:
    x, weight, bias, gate = arguments(spec, seed)
    alone = count_elements(x, spec, None) == 1  # no unbiased variance; and without an eps 0 / 0
    assume(not alone or (spec.statistic != "unbiased" and (spec.eps > 0 or not spec.centered)))
    y = normalize(x, spec, weight, bias, gate=gate)
    assert y.dtype == torch.float64
    # 1e-12: some hundred float64 roundings of 1.1e-16 on values of order 10
    torch.testing.assert_close(y, straight_line(x, spec, weight, bias, gate), rtol=1e-12, atol=1e-12)


def test_channels_last_keeps_its_layout_and_its_digits() -> None:
    """torch's GroupNorm errs by 1088 here: E[x^2] - E[x]^2 with a mean of 2000."""
    x = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0)) + 2000
    spec = S.TORCH_GROUP.replace(groups=2, has_weight=False, has_bias=False)
    wanted = torch.nn.functional.group_norm(x.double(), 2)
    for layout in (torch.contiguous_format, torch.channels_last):
        given_x = x.contiguous(memory_format=layout)
        y = normalize(given_x, spec)
        assert y.is_contiguous(memory_format=layout)
        # 2000 is 11 bits above the unit spread: what is left of float32's 24 bits, on values up to 5
        torch.testing.assert_close(y.double(), wanted, rtol=0, atol=2e-6)


def test_small_spread_on_a_large_mean() -> None:
    """16 values 1e4 + i * 1e-3: plain two-pass in float32 errs by 0.09."""
    x = 1e4 + torch.arange(16) * 1e-3
    spec = NormSpec(has_weight=False)
    wanted = normalize(x.double(), spec)
    torch.testing.assert_close(normalize(x, spec).double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1e30, 3e37])
def test_squares_that_overflow_float32(size: float) -> None:
    x = torch.randn(3, 65, generator=torch.Generator().manual_seed(0)) * size
    for spec in (S.TORCH_RMS, S.TORCH_LAYER, S.L2_NORMALIZE.replace(rounding="after_gain"), S.TEXTBOOK_LAYER):
        spec = spec.replace(has_weight=False, has_bias=False)
        torch.testing.assert_close(normalize(x, spec).double(), normalize(x.double(), spec), rtol=1e-6, atol=1e-6)


def test_squares_that_underflow_without_an_eps() -> None:
    x = torch.randn(3, 65, generator=torch.Generator().manual_seed(0)) * 1e-30
    spec = S.TORCH_RMS.replace(has_weight=False, eps=0.0)
    torch.testing.assert_close(normalize(x, spec).double(), normalize(x.double(), spec), rtol=1e-6, atol=0)


def test_float16_of_300_is_about_one() -> None:
    y = normalize(torch.full((64,), 300.0, dtype=torch.float16), S.GEMMA.replace(has_weight=False))
    assert y.dtype == torch.float16
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize("name", ["gemma", "torch_layer", "l2_normalize", "scale_norm", "annotated_layer"])
def test_rows_of_zeros_give_zeros_and_finite_gradients(name: str) -> None:
    spec = S.NAMED[name].replace(has_weight=False, has_bias=False)
    spec = spec.replace(rounding="after_gain", weight_shape="features")
    half = normalize(torch.zeros(2, 7, dtype=torch.float16), spec)
    assert torch.equal(half, torch.zeros_like(half))
    x = torch.zeros(2, 7, requires_grad=True)  # float32: the true gradient, 1 / eps, exceeds float16
    normalize(x, spec).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_a_nan_row_stays_its_own_problem() -> None:
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(0))
    clean = normalize(x, S.TORCH_LAYER.replace(has_weight=False, has_bias=False))
    x[2, 5] = float("nan")
    y = normalize(x, S.TORCH_LAYER.replace(has_weight=False, has_bias=False))
    assert torch.isnan(y[2]).all()
    kept = [0, 1, 3]
    assert torch.equal(y[kept], clean[kept])


def test_one_row_alone_and_in_a_batch_gives_the_same_bits() -> None:
    x = torch.randn(256, 129, generator=torch.Generator().manual_seed(0))
    spec = S.GEMMA.replace(has_weight=False)
    assert torch.equal(normalize(x, spec)[17:18], normalize(x[17:18], spec))


@pytest.mark.parametrize("axes", ["batch", "instance", "group"])
def test_masked_positions_do_not_count_and_come_out_as_zero(axes: str) -> None:
    spec = NormSpec(axes=axes, channel_dim=1, groups=2 if axes == "group" else 1, has_weight=False)  # type: ignore[arg-type]
    x = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(10) < torch.tensor([[10], [6], [3]])
    poisoned = torch.where(mask[:, None], x, float("nan")).requires_grad_()
    y = normalize(poisoned, spec, mask=mask)
    assert torch.equal(y[~mask[:, None].expand_as(y)], torch.zeros((~mask).sum() * 4, dtype=torch.float64))
    if axes == "batch":
        packed = x.permute(0, 2, 1)[mask]
        wanted = normalize(packed, spec.replace(channel_dim=-1))
        torch.testing.assert_close(y.permute(0, 2, 1)[mask], wanted)
    else:
        for sample, length in enumerate([10, 6, 3]):
            wanted = normalize(x[sample : sample + 1, :, :length], spec)
            torch.testing.assert_close(y[sample : sample + 1, :, :length], wanted)
    y.square().sum().backward()
    assert poisoned.grad is not None
    assert torch.isfinite(poisoned.grad).all()
    assert (poisoned.grad[~mask[:, None].expand_as(y)] == 0).all()


def test_padding_mean_counts_valid_positions_only() -> None:
    x = torch.tensor([[[3.0], [5.0], [0.0], [0.0]]])
    mask = torch.tensor([[1, 1, 0, 0]])
    assert statistics(x, NormSpec(axes="batch"), mask).mean.item() == 4.0


def test_gain_is_formed_in_the_dtype_that_the_spec_names() -> None:
    """1 + w with w = 15.8125: 16.8125 in float32, 16.75 in bfloat16."""
    x, w = torch.ones(1, 1), torch.tensor([15.8125], dtype=torch.bfloat16)
    spec = S.GEMMA.replace(eps=0.0)
    assert normalize(x, spec, w).item() == 16.8125
    assert normalize(x, spec.replace(gain_dtype="input"), w).item() == 16.75


@pytest.mark.parametrize("x_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("w_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_dtype_is_declared(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 8).to(x_dtype), torch.ones(8).to(w_dtype)
    wanted = {"input": x_dtype, "promoted": torch.promote_types(x_dtype, w_dtype), "weight": w_dtype}
    for rounding, (output, dtype) in itertools.product(("before_gain", "after_gain", "none"), wanted.items()):
        spec = S.TORCH_RMS.replace(rounding=rounding, output_dtype=output)
        assert normalize(x, spec, w).dtype == dtype


def test_gradients_twice() -> None:
    for name, spec in S.NAMED.items():
        x, weight, bias, gate = arguments(spec.replace(groups=1), 0)
        spec = spec.replace(groups=2) if spec.groups > 1 else spec
        spec = spec.replace(eps=1e-3)  # near zero rows a finite difference needs some room
        inputs = [t.requires_grad_() for t in (x, weight, bias, gate) if t is not None]

        def call(*tensors: Tensor, spec: NormSpec = spec) -> Tensor:
            rest = list(tensors)
            given_x = rest.pop(0)
            w = rest.pop(0) if spec.has_weight else None
            b = rest.pop(0) if spec.has_bias else None
            return normalize(given_x, spec, w, b, gate=rest.pop(0) if rest else None)

        assert torch.autograd.gradcheck(call, inputs, fast_mode=True), name
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True), name


def test_empty_inputs() -> None:
    for shape in ((0, 8), (3, 0, 8)):
        assert normalize(torch.empty(shape), S.TORCH_RMS, torch.ones(8)).shape == shape
    assert normalize(torch.empty(2, 0), S.TORCH_RMS.replace(has_weight=False)).shape == (2, 0)


def _ones(n: int) -> list[Tensor]:
    """A weight and a bias."""
    return [torch.ones(n)] * 2


@pytest.mark.parametrize(
    ("error", "call", "said"),
    [
        (TypeError, lambda: normalize(torch.ones(2, 3, dtype=torch.int64), S.OLMO), "torch.int64"),
        (ValueError, lambda: normalize(torch.ones(2, 3), S.TORCH_RMS), "weight is missing"),
        (ValueError, lambda: normalize(torch.ones(2, 3), S.OLMO, torch.ones(3)), "weight is given"),
        (ValueError, lambda: normalize(torch.ones(2, 3), S.TORCH_RMS, torch.ones(4)), r"\(4,\).*\(3,\)"),
        (ValueError, lambda: normalize(torch.ones(2, 6, 4), S.TORCH_GROUP.replace(groups=4), *_ones(6)), "groups=4"),
        (ValueError, lambda: normalize(torch.ones(3), S.TORCH_GROUP, *_ones(3)), "at least 2 dims"),
        (ValueError, lambda: normalize(torch.ones(2, 3), S.MAMBA2_GATED, torch.ones(3)), "gate is missing"),
        (ValueError, lambda: normalize(torch.ones(2, 3), S.OLMO, mask=torch.ones(2)), "mask has no meaning"),
        (ValueError, lambda: normalize(torch.ones(2, 1), S.ANNOTATED_LAYER, *_ones(1)), "at least 2 elements"),
        (ValueError, lambda: normalize(torch.ones(2, 3), S.TORCH_RMS, torch.ones(3, device="meta")), "meta"),
        (ValueError, lambda: normalize(torch.ones(2, 3, 4), S.TORCH_BATCH, *_ones(3),
                                       running_mean=torch.ones(3)), "together"),
    ],
)  # fmt: skip
def test_bad_arguments_name_themselves(error: type[Exception], call: object, said: str) -> None:
    with pytest.raises(error, match=said):
        call()  # type: ignore[operator]
