"""Row kernels against float64: every dtype pair, awkward sizes and strides, gradients, and rows that must not meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from normkit import ops
from tests.ops.tolerances import assert_forward, assert_gradient

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (1, 7, 16, 63, 65, 128, 1000, 4099)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    x, w, b = randn(5, size, dtype=dtype), randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    for weight, bias, offset in ((w, None, 0.0), (w, b, 1.0), (None, None, 0.0), (None, b, 0.0)):
        y = ops.rms_norm(x, weight, bias, 1e-6, offset)
        exact = ops.rms_norm_reference(*double(x, weight, bias), 1e-6, offset)
        assert_forward(y, exact, bias)
        assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(dtype: torch.dtype, size: int) -> None:
    x, w, b = randn(5, size, dtype=dtype), randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    for weight, bias, offset in ((w, b, 0.0), (w, None, 1.0), (None, None, 0.0)):
        y = ops.layer_norm(x, weight, bias, 1e-5, offset)
        rstd = (x.double().var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        gain = torch.ones(()) if weight is None else weight.double() + offset
        shift = torch.zeros(()) if bias is None else bias.double()
        exact = (x.double() - x.double().mean(-1, keepdim=True)) * rstd * gain + shift
        # the mean errs by a little of the row's largest value, which shows where x is close to the mean
        assert_forward(y, exact, (x.double().abs().amax(-1, keepdim=True) * rstd * gain).abs() / 4 + shift.abs())


@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_dtype_pairs_agree_with_the_reference(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w, b = randn(64, 320, dtype=x_dtype), randn(320, dtype=w_dtype, seed=1), randn(320, dtype=w_dtype, seed=2)
    cases = [
        (ops.rms_norm, ops.rms_norm_reference, (x, w, None, 1e-6, 0.0, False, False)),
        (ops.rms_norm, ops.rms_norm_reference, (x, w, None, 1e-6, 1.0, False, False)),
        (ops.rms_norm, ops.rms_norm_reference, (x, w, None, 1e-6, 1.0, True, False)),
        (ops.rms_norm, ops.rms_norm_reference, (x, w, None, 1e-6, 0.0, False, True)),
        (ops.rms_norm, ops.rms_norm_reference, (x, w, b, 1e-6, 0.0, False, True)),
        (ops.layer_norm, ops.layer_norm_reference, (x, w, b, 1e-5, 0.0, False, False)),
        (ops.layer_norm, ops.layer_norm_reference, (x, w, b, 1e-5, 1.0, True, False)),
    ]
    for f, plain, args in cases:
        for dtype in {None, torch.promote_types(x_dtype, w_dtype), w_dtype}:
            y, expected = f(*args, dtype), plain(*args, dtype)
            if y.element_size() > 2 and x_dtype.itemsize == 2 and args[-1]:
                y, expected = y.to(x_dtype), expected.to(x_dtype)  # a flip before the gain is no float32 error
            assert_same_bits_mostly(y, expected, args[-1])


def assert_same_bits_mostly(y: Tensor, expected: Tensor, rounds_before: bool = False) -> None:
    """The promise on half types against the float32 reference, which adds in another order.

    A result may fall on the other side of a rounding boundary: one unit in the last place (two where the gain
    multiplies a rounded value), on at most 1 output in 10 000. float16's boundaries are 8 times denser, and one float32
    unit moves 1.2e-4 of the results across one: 5 in 10 000. Where x nearly is its mean, the reference's own error of
    the mean (1e-8 of the row) counts in many of the result's small units.
    """
    assert y.dtype == expected.dtype and y.shape == expected.shape
    if y.element_size() != 2:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=2e-6)
        return
    a, b = y.float(), expected.float()
    unit = torch.finfo(y.dtype).eps * torch.maximum(a.abs(), b.abs())
    allowed = unit * (2.01 if rounds_before else 1.01) + 1e-7 * b.abs().amax(-1, keepdim=True)
    assert ((a - b).abs() <= allowed).all()
    share = 1e-4 if y.dtype == torch.bfloat16 else 5e-4
    assert (a != b).sum() <= 3 + share * y.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_half_types_keep_the_reference_bits(name: str, dtype: torch.dtype, rounds: bool) -> None:
    x, w = randn(2000, 512, dtype=dtype), randn(512, dtype=dtype, seed=1)
    args = (x, w, None, 1e-6, 0.0, False, rounds)
    assert_same_bits_mostly(getattr(ops, name)(*args), getattr(ops, f"{name}_reference")(*args), rounds)


def test_rounding_order_is_told_apart() -> None:
    x, w = randn(200, 512, dtype=torch.bfloat16), randn(512, dtype=torch.bfloat16, seed=1)
    before, after = ops.rms_norm(x, w, round_before_gain=True), ops.rms_norm(x, w)
    assert (before != after).float().mean() > 0.1  # a tolerance of 1e-2 would hide it


def test_gain_is_formed_where_asked() -> None:
    w = torch.full((64,), 15.8125, dtype=torch.bfloat16)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    assert ops.rms_norm(x, w, None, 0.0, 1.0, dtype=torch.float32)[0, 0] == 16.8125
    assert ops.rms_norm(x, w, None, 0.0, 1.0, gain_in_input=True, dtype=torch.float32)[0, 0] == 16.75


# ---- accuracy where naive forms fail ----


def test_large_mean_small_spread() -> None:
    """Plain two-pass float32 errs by 0.09 here, and torch by 0.098."""
    x = (1e4 + torch.arange(16) * 1e-3).float()[None]
    exact = ops.layer_norm_reference(x.double(), eps=1e-5)
    assert (ops.layer_norm(x) - exact).abs().max() < 5e-7
    xg = x.clone().requires_grad_()
    xd = x.double().requires_grad_()
    g = randn(1, 16)
    ops.layer_norm(xg).backward(g)
    ops.layer_norm_reference(xd).backward(g.double())
    assert (xg.grad - xd.grad).abs().max() <= 1e-5 * xd.grad.abs().max()


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_squares_out_of_range(scale: float) -> None:
    x = randn(4, 100) * scale
    for name in ("rms_norm", "layer_norm"):
        exact = getattr(ops, f"{name}_reference")(x.double(), eps=0.0)
        assert (getattr(ops, name)(x, eps=0.0) - exact).abs().max() < 2e-6
    wide = randn(4, 100, dtype=torch.float64) * (scale**6)  # 1e180: the square overflows float64
    plain = ops.rms_norm(wide / scale**6, eps=0.0)
    assert (ops.rms_norm(wide, eps=0.0) - plain).abs().max() < 1e-14


def test_float16_square_overflows_not() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert (ops.rms_norm(x) - 1).abs().max() == 0
    assert ops.rms_norm(torch.zeros(2, 64, dtype=torch.float16)).abs().max() == 0


def test_nan_stays_in_its_row() -> None:
    for dtype in DTYPES:
        x = randn(5, 200, dtype=dtype)
        clean = ops.layer_norm(x), ops.rms_norm(x)
        x[2, 77] = float("nan")
        x[3, 5] = float("inf")
        for y, before in zip((ops.layer_norm(x), ops.rms_norm(x)), clean, strict=True):
            assert y[2].isnan().all()
            assert y[3].isnan().any()
            assert torch.equal(y[[0, 1, 4]], before[[0, 1, 4]])


# ---- shapes and strides ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_a_fused_projection(dtype: torch.dtype) -> None:
    heads, size = 6, 64
    qkv = randn(2, 9, 3 * heads * size, dtype=dtype)
    q = qkv[..., : heads * size].unflatten(-1, (heads, size))
    w = randn(size, dtype=dtype, seed=1)
    assert torch.equal(ops.rms_norm(q, w), ops.rms_norm(q.contiguous(), w))
    per_head = randn(heads, size, dtype=dtype, seed=2)
    y = ops.rms_norm(q, per_head)
    for h in range(heads):
        assert torch.equal(y[..., h, :], ops.rms_norm(q[..., h, :], per_head[h]))
    k = q.transpose(1, 2)  # heads before positions, as attention wants them
    assert torch.equal(ops.layer_norm(k, w), ops.layer_norm(k.contiguous(), w))


def test_odd_strides() -> None:
    base = randn(8, 6, 5, 40)
    for x in (
        base.permute(2, 0, 1, 3), base[::2, ::3, 1::2, 3:37], base.flip(0), base[:, :1].expand(8, 6, 5, 40),
        base.transpose(-1, -2), base[..., ::2], base[0, 0, 0], base.as_strided((3, 4, 5, 6, 7), (5, 90, 11, 200, 1)),
    ):  # fmt: skip
        assert torch.equal(ops.layer_norm(x), ops.layer_norm(x.contiguous()))
        xg = x.detach().clone().requires_grad_()
        ops.rms_norm(xg).sum().backward()
        xs = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(ops.rms_norm(xs).sum(), xs)
        assert torch.equal(grad, xg.grad)


def test_empty_and_degenerate() -> None:
    for shape in ((0, 8), (3, 0), (0, 0), (2, 0, 5), (8,), (1, 1)):
        x = torch.randn(shape, requires_grad=True)
        w = torch.ones(shape[-1:], requires_grad=True)
        for f in (ops.rms_norm, ops.layer_norm):
            y = f(x, w)
            assert y.shape == x.shape
            grads = torch.autograd.grad(y.sum(), (x, w))
            assert grads[0].shape == x.shape and grads[1].shape == w.shape
            assert y.numel() == 0 or grads[1].isfinite().all()
            if len(shape) == 2 and shape[0] == 0:
                assert (grads[1] == 0).all()
    assert (ops.layer_norm(torch.full((2, 9), 3.0)) == 0).all()  # constant rows
    assert (ops.layer_norm(torch.randn(4, 1)) == 0).all()


def test_bad_arguments_say_so() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="weight has shape"):
        ops.rms_norm(x, torch.ones(7))
    with pytest.raises(TypeError, match="floating point"):
        ops.rms_norm(torch.ones(2, 8, dtype=torch.int32))
    with pytest.raises(ValueError, match="bias"):
        ops.layer_norm(x, torch.ones(8), torch.ones(3))


def test_other_devices_are_refused() -> None:
    x, meta = torch.randn(2, 8), torch.ones(8, device="meta")
    for f in (ops.rms_norm, ops.layer_norm, ops.group_norm, ops.batch_norm_train, ops.channel_layer_norm):
        with pytest.raises(ValueError, match="meta"):
            f(x, meta)
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        ops.add_rms_norm(x, torch.ones(2, 8, device="meta"))


# ---- gradients ----

Case = tuple[str, Callable[..., object], Callable[..., object], int]
GRADIENT_CASES: list[Case] = [
    ("rms", lambda x, r, w, b: ops.rms_norm(x, w), lambda x, r, w, b: ops.rms_norm_reference(x, w), 0),
    ("rms_bias", lambda x, r, w, b: ops.rms_norm(x, w, b, 1e-6, 1.0),
     lambda x, r, w, b: ops.rms_norm_reference(x, w, b, 1e-6, 1.0), 0),
    ("layer", lambda x, r, w, b: ops.layer_norm(x, w, b), lambda x, r, w, b: ops.layer_norm_reference(x, w, b), 0),
    ("add_rms", lambda x, r, w, b: ops.add_rms_norm(x, r, w),
     lambda x, r, w, b: ops.add_rms_norm_reference(x, r, w), 1),
    ("add_layer", lambda x, r, w, b: ops.add_layer_norm(x, r, w, b),
     lambda x, r, w, b: ops.add_layer_norm_reference(x, r, w, b), 1),
    ("gate_after", lambda x, r, w, b: ops.gated_rms_norm(x, r, w),
     lambda x, r, w, b: ops.gated_rms_norm_reference(x, r, w), 0),
    ("gate_before", lambda x, r, w, b: ops.gated_rms_norm(x, r, w, gate_before=True),
     lambda x, r, w, b: ops.gated_rms_norm_reference(x, r, w, gate_before=True), 0),
    ("sigmoid", lambda x, r, w, b: ops.gated_rms_norm(x, r, w, silu=False),
     lambda x, r, w, b: ops.gated_rms_norm_reference(x, r, w, silu=False), 0),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 63, 128, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=lambda c: c[0])
def test_gradients(case: Case, dtype: torch.dtype, size: int) -> None:
    _, f, plain, adds = case
    rows = 33
    inputs = [randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype, seed=3)]
    if adds and dtype.itemsize == 2:
        # so that the sum needs no rounding, which float64 would not do
        inputs = [(t * 16).round().clamp(-32, 32).to(dtype) / 16 for t in inputs]
    inputs += [randn(size, dtype=dtype, seed=4), randn(size, dtype=dtype, seed=5)]
    mine = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    outs, exact_outs = f(*mine), plain(*exact)
    outs = outs if isinstance(outs, tuple) else (outs,)
    exact_outs = exact_outs if isinstance(exact_outs, tuple) else (exact_outs,)
    gs = [randn(rows, size, dtype=dtype, seed=6 + i) for i in range(len(outs))]
    got = torch.autograd.grad(outs, mine, gs, allow_unused=True)
    want = torch.autograd.grad(exact_outs, exact, [g.double() for g in gs], allow_unused=True)
    for d, e in zip(got, want, strict=True):
        assert (d is None) == (e is None)
        if d is not None and e is not None:
            if size == 1:  # everything cancels: compare with what cancelled
                assert (d - e).abs().max() <= 1e-2 + e.abs().max() * 2.0**-7
                continue
            assert_gradient(d, e, dtype, terms=rows if e.dim() == 1 else 1)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(itertools.product((torch.bfloat16, torch.float32), DTYPES[:3])))
def test_gradient_dtypes(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w = randn(16, 96, dtype=x_dtype).requires_grad_(), randn(96, dtype=w_dtype, seed=1).requires_grad_()
    for dtype in (x_dtype, torch.float32, w_dtype):
        y = ops.rms_norm(x, w, dtype=dtype)
        g = randn(16, 96, dtype=y.dtype, seed=2)
        dx, dw = torch.autograd.grad(y, (x, w), g)
        assert dx.dtype == x_dtype and dw.dtype == w_dtype
        xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
        ex, ew = torch.autograd.grad(ops.rms_norm_reference(xd, wd), (xd, wd), g.double())
        assert_gradient(dx, ex, torch.float32)
        assert_gradient(dw, ew, torch.float32, terms=16)


def test_bfloat16_weight_gradient_of_many_rows() -> None:
    """torch's is off by 8.5 % of its maximum at 4096 rows: it adds up in bfloat16."""
    x, g = randn(4096, 256, dtype=torch.bfloat16), randn(4096, 256, dtype=torch.bfloat16, seed=1)
    w, b = torch.ones(256, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16)
    mine = [t.clone().requires_grad_() for t in (x, w, b)]
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    got = torch.autograd.grad(ops.layer_norm(*mine), mine, g)
    want = torch.autograd.grad(ops.layer_norm_reference(*exact), exact, g.double())
    for d, e in zip(got[1:], want[1:], strict=True):
        assert (d - e).abs().max() <= 0.005 * e.abs().max()


@pytest.mark.parametrize(("rows", "features"), [(20_000, 3), (60_000, 3), (100_000, 4), (300_000, 1)])
def test_sums_of_many_equal_gradients_of_few_features(rows: int, features: int) -> None:
    """Equal terms round alike: their errors do not average out, so the sums must be short."""
    x, w, b = randn(rows, features), randn(features, seed=1).requires_grad_(), randn(features, seed=2).requires_grad_()
    db = torch.autograd.grad(ops.layer_norm(x, w, b), b, torch.full((rows, features), 0.7))[0].double()
    exact = rows * float(torch.tensor(0.7))
    assert (db - exact).abs().max() <= 4 * rows**0.5 * 2.0**-24 * exact


def test_wide_stream() -> None:
    """A float32 residual stream under a bfloat16 layer."""
    x, r = randn(7, 130, dtype=torch.bfloat16), randn(7, 130, seed=1)
    w = randn(130, dtype=torch.bfloat16, seed=2)
    y, total = ops.add_rms_norm(x, r, w, round_before_gain=True)
    expected, sum_expected = ops.add_rms_norm_reference(x, r, w, round_before_gain=True)
    assert y.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.equal(total, sum_expected)
    assert_same_bits_mostly(y, expected)
    mine = [t.clone().requires_grad_() for t in (x, r, w)]
    y, total = ops.add_rms_norm(*mine)
    dx, dr, dw = torch.autograd.grad(y.sum() + total.sum(), mine)
    assert (dx.dtype, dr.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


def test_out_and_inplace() -> None:
    x, r, w = randn(5, 48), randn(5, 48, seed=1), randn(48, seed=2)
    out = torch.empty_like(x)
    assert ops.rms_norm_out(x, w, out=out) is out
    assert torch.equal(out, ops.rms_norm(x, w))
    strided = torch.zeros(5, 100)[:, 10:58]
    ops.layer_norm_out(x, w, None, 1e-6, out=strided)
    assert torch.equal(strided, ops.layer_norm(x, w, None, 1e-6))
    y, total = ops.add_rms_norm(x, r, w)
    stream = r.clone()
    ops.add_rms_norm_out(x, stream, w, out=out, sum=stream)
    assert torch.equal(out, y) and torch.equal(stream, total)
    version = stream._version
    ops.add_rms_norm_out(x, stream, w, out=out, sum=stream)
    assert stream._version > version  # or autograd would not notice that a saved tensor changed
    own = x.clone()
    ops.rms_norm_out(own, w, out=own)  # in place
    assert torch.equal(own, ops.rms_norm(x, w))
    z = torch.empty_like(x)
    assert torch.equal(ops.gated_rms_norm_out(x, r, w, out=z), ops.gated_rms_norm(x, r, w))
    half = torch.empty(5, 48, dtype=torch.bfloat16)
    assert torch.equal(ops.rms_norm_out(x, w, out=half), ops.rms_norm(x, w, dtype=torch.bfloat16))
