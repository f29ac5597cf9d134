"""Channel kernels against float64, in both memory layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from normkit import ops
from tests.ops.test_rows import DTYPES, randn
from tests.ops.tolerances import assert_forward, assert_gradient

SHAPES = ((2, 8, 5, 7), (3, 64, 14, 14), (2, 40, 1), (4, 24), (2, 72, 7, 7), (1, 4, 3), (2, 6, 2, 3, 4), (3, 16, 67))
Operator = Callable[..., Tensor]
MEAN, VAR = (lambda c: randn(c, seed=7)), (lambda c: randn(c, seed=8).abs() + 0.5)
OPERATORS: dict[str, tuple[Operator, Operator]] = {
    "group": (lambda x, w, b: ops.group_norm(x, w, b, 2), lambda x, w, b: ops.group_norm_reference(x, w, b, 2)),
    "instance": (ops.instance_norm, lambda x, w, b: ops.group_norm_reference(x, w, b, x.shape[1])),
    "batch_train": (
        lambda x, w, b: ops.batch_norm_train(x, w, b)[0],
        lambda x, w, b: ops.batch_norm_train_reference(x, w, b)[0],
    ),
    "batch": (
        lambda x, w, b: ops.batch_norm(x, MEAN(x.shape[1]), VAR(x.shape[1]), w, b),
        lambda x, w, b: ops.batch_norm_reference(x, MEAN(x.shape[1]).double(), VAR(x.shape[1]).double(), w, b),
    ),
    "channel_layer": (ops.channel_layer_norm, ops.channel_layer_norm_reference),
}


def in_layout(x: Tensor, last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_forward_and_gradients(name: str, dtype: torch.dtype, shape: tuple[int, ...], last: bool) -> None:
    f, plain = OPERATORS[name]
    c = shape[1]
    inputs = [in_layout(randn(*shape, dtype=dtype), last), randn(c, dtype=dtype, seed=1), randn(c, dtype=dtype, seed=2)]
    g = in_layout(randn(*shape, dtype=dtype, seed=3), last)
    mine = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    y, expected = f(*mine), plain(*exact)
    assert y.dtype == dtype and y.stride() == inputs[0].stride()
    wb = [t.double().abs().reshape(-1, *[1] * (len(shape) - 2)) for t in inputs[1:]]
    # where few elements share a statistic x may nearly be its mean: what was subtracted counts
    assert_forward(y, expected.detach(), wb[1] + wb[0] * 4)
    got, want = torch.autograd.grad(y, mine, g), torch.autograd.grad(expected, exact, g.double())
    shares = {"group": y.numel() / shape[0] / 2, "instance": y.numel() / shape[0] / c, "batch_train": y.numel() / c}
    if shares.get(name, 100) <= 4:  # two or so elements share a statistic: everything cancels
        for d, e in zip(got, want, strict=True):
            assert (d - e).abs().max() <= 2e-2 * (1 + e.abs().max())
        return
    assert got[0].stride() == inputs[0].stride()
    for d, e in zip(got, want, strict=True):
        assert_gradient(d, e, dtype, terms=1 if e.dim() > 1 else y.numel() // c)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("offset", [100.0, 1000.0, 2000.0, 1e5])
def test_large_mean(offset: float, last: bool) -> None:
    """torch's channels-last GroupNorm errs by 1088 at a mean of 2000."""
    x = in_layout(randn(2, 8, 16, 16) + offset, last)
    for f, plain in OPERATORS.values():
        y, exact = f(x, None, None), plain(x.double(), None, None)
        if f is not OPERATORS["batch"][0]:
            assert (y - exact).abs().max() < 4e-6
    y, mean, var, _ = ops.batch_norm_train(x)
    assert (mean - x.double().mean((0, 2, 3))).abs().max() < 1e-7 * offset
    assert (var - x.double().var((0, 2, 3), unbiased=False)).abs().max() < 1e-6


@pytest.mark.parametrize("last", [False, True])
def test_squares_out_of_range(last: bool) -> None:
    x = in_layout(randn(2, 8, 6, 6), last)
    for name in ("group", "instance", "batch_train", "channel_layer"):
        f, _ = OPERATORS[name]
        assert (f(x * 2.0**100, None, None) - f(x * 2.0**20, None, None)).abs().max() < 1e-5


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("size", [1e30, 1e-10])
def test_a_small_gain_of_extreme_values_loses_no_digits(last: bool, size: float) -> None:
    """A gain of 1e-10 over the deviation of values of 1e30 is below the normal floats; the result is not."""
    x, w = in_layout(randn(2, 24, 5, 5), last) * size, randn(24, seed=1) * 1e-10
    for name in ("group", "instance", "batch_train"):
        f, plain = OPERATORS[name]
        truth = plain(x.double(), w.double(), None)
        assert (f(x, w, None) - truth).abs().max() <= 16 * 2**-24 * truth.abs().max(), name


@pytest.mark.parametrize("space", [2, 3, 7, 15])
@pytest.mark.parametrize("last", [False, True])
def test_many_short_segments_sum_as_well_as_few_long_ones(space: int, last: bool) -> None:
    """Values of two sizes round the same way at each addition: long float sums of their squares lose four digits."""
    x = in_layout(randn(4096 // space * 2, 3, space).sign() * 0.7773, last).requires_grad_()
    w = torch.ones(3, requires_grad=True)
    y, _, variance, _ = ops.batch_norm_train(x, w)
    wide = x.detach().double()
    mean, true = wide.mean((0, 2), keepdim=True), wide.var((0, 2), unbiased=False)
    hat = (wide - mean) / (true.view(1, 3, 1) + 1e-5).sqrt()
    assert ((variance - true).abs() / true).max() < 16 * 2**-24
    assert (y.double() - hat).abs().max() < 16 * 2**-24
    dweight = torch.autograd.grad(y, w, x.detach())[0]
    exact = (wide * hat).sum((0, 2))
    assert ((dweight - exact).abs() / exact).max() < 32 * 2**-24


@pytest.mark.parametrize("last", [False, True])
def test_a_large_constant_has_no_variance(last: bool) -> None:
    x = in_layout(torch.full((4, 8, 3), 2.0**600, dtype=torch.float64), last)
    for name in ("group", "instance", "batch_train"):
        assert (OPERATORS[name][0](x, None, None) == 0).all(), name
    assert (ops.batch_norm_train(x[:, :, 0])[2] == 0).all()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("gain", "variance", "size"), [(1e30, 1e-30, 1e-20), (1e30, 1e-20, 0.0), (1e-10, 1e60, 1e20)])
def test_gradient_by_given_statistics_out_of_range(last: bool, gain: float, variance: float, size: float) -> None:
    """The gain over the deviation may leave float32 where the gradient does not."""
    x = in_layout(randn(6, 3, 4), last).requires_grad_()
    mean, var = torch.zeros(3, dtype=torch.float64), torch.full((3,), variance, dtype=torch.float64)
    y = ops.batch_norm(x, mean, var, torch.full((3,), gain), None, None, 0.0)
    dx = torch.autograd.grad(y, x, torch.full_like(y, size))[0].double()
    exact = size * gain / variance**0.5
    assert (dx - exact).abs().max() <= 1e-6 * exact


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1e30), (0.0, 1e-15), (1e30, 1e28), (1e4, 1e-2), (-1e4, 3e-3)])
def test_gradient_of_a_batch_far_from_one(last: bool, mean: float, deviation: float) -> None:
    """The part of dx along x̂: its factor of x in that may leave float32, or need the mean's digits."""
    x = in_layout(mean + deviation * randn(60, 5, 9), last)
    exact = x.double()
    centred = exact - exact.mean((0, 2), keepdim=True)
    hat = centred / exact.std((0, 2), correction=0, keepdim=True)
    grad = (hat + 0.3 * in_layout(randn(60, 5, 9, seed=1), last)).float()  # much of it along x̂
    gain = 1 + 0.5 * randn(5, seed=2)
    x.requires_grad_(), exact.requires_grad_()
    dx = torch.autograd.grad(ops.batch_norm_train(x, gain, None, None, 0.0)[0], x, grad)[0]
    y = ops.batch_norm_train_reference(exact, gain.double(), None, None, 0.0)[0]
    assert_gradient(dx, torch.autograd.grad(y, exact, grad.double())[0], torch.float32)


@pytest.mark.parametrize("last", [False, True])
def test_a_channel_without_finite_statistics_changes_no_bit_of_another(last: bool) -> None:
    x, w = in_layout(randn(40, 33, 7), last), randn(33, seed=1)
    clean = ops.batch_norm_train(x, w)[0]
    x[3, 5, 2] = float("inf")
    y = ops.batch_norm_train(x, w)[0]
    others = [c for c in range(33) if c != 5]
    assert torch.equal(y[:, others], clean[:, others]) and not y[:, 5].isfinite().any()


EXTREMES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "gain 1e-37": lambda x, w, g: w[5].fill_(1e-37),
    "gain inf": lambda x, w, g: w[5].fill_(float("inf")),
    "x 1e18": lambda x, w, g: x[:, 5].mul_(1e18),
    "gradient 1e-34": lambda x, w, g: g[:, 5].mul_(1e-34),
    "gradient inf": lambda x, w, g: g[3, 5].fill_(float("inf")),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ["batch_train", "batch", "instance"])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_an_extreme_channel_changes_no_bit_of_another(extreme: str, name: str, last: bool) -> None:
    def run() -> tuple[Tensor, Tensor]:
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = OPERATORS[name][0](leaf, w, None)
        others = [c for c in range(33) if c != 5]
        return y.detach()[:, others], torch.autograd.grad(y, leaf, g)[0][:, others]

    x, w, g = in_layout(randn(40, 33, 7), last), randn(33, seed=1), in_layout(randn(40, 33, 7, seed=2), last)
    usual = run()
    EXTREMES[extreme](x, w, g)
    for now, before in zip(run(), usual, strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize("last", [False, True])
def test_by_given_statistics_a_masked_gradient_is_infinite_only_where_it_is(last: bool) -> None:
    x, g = in_layout(randn(6, 3, 4), last), in_layout(randn(6, 3, 4, seed=1), last)
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[0, :2] = False
    x[2, 1, 0], g[3, 1, 2], g[0, 1, 1] = float("inf"), float("nan"), float("inf")  # the last is masked
    x.requires_grad_()
    y = ops.batch_norm(x, MEAN(3), VAR(3), None, None, mask)
    dx = torch.autograd.grad(y, x, g)[0]
    expected = torch.where(mask[:, None], g / (VAR(3) + 1e-5).sqrt()[:, None], 0.0)
    torch.testing.assert_close(dx, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("last", [False, True])
def test_a_nan_of_any_payload_stays_one_in_half_precision(last: bool) -> None:
    """Rounding to bfloat16 by an addition takes the NaN whose bits are all ones to zero."""
    x, w = in_layout(randn(2, 24, 5, 5), last).bfloat16(), randn(24, seed=1)
    w.view(torch.int32)[3] = 0x7FFFFFFF
    for name, (f, _) in OPERATORS.items():
        y = f(x, w, None)
        assert y[:, 3].isnan().all() and not y[:, [2, 4]].isnan().any(), name


def test_nan_stays_in_its_statistic() -> None:
    for last in (False, True):
        x = in_layout(randn(3, 8, 5, 5), last)
        clean = {n: f(x, None, None) for n, (f, _) in OPERATORS.items()}
        x[1, 2, 3, 3] = float("nan")
        reach = {
            "group": (1, slice(0, 4)), "instance": (1, 2), "batch_train": (slice(None), 2), "batch": (1, 2, 3, 3),
            "channel_layer": (1, slice(None), 3, 3),
        }  # fmt: skip
        for n, (f, _) in OPERATORS.items():
            y = f(x, None, None)
            touched = torch.zeros_like(y, dtype=torch.bool)
            touched[reach[n]] = True
            assert y[touched].isnan().all()
            assert torch.equal(y[~touched], clean[n][~touched])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_batch_norm(dtype: torch.dtype, last: bool) -> None:
    x = in_layout(randn(3, 20, 9, 7, dtype=dtype), last)
    mask = randn(3, 9, 7, seed=1) > -0.3
    x = torch.where(mask[:, None], x, torch.full_like(x, float("nan")))  # what is masked must not be looked at
    w, b = randn(20, dtype=dtype, seed=2), randn(20, dtype=dtype, seed=3)
    mine = [t.clone().requires_grad_() for t in (x, w, b)]
    y, mean, var, count = ops.batch_norm_train(*mine, mask)
    rows = x.double().movedim(1, -1)[mask]
    assert count.item() == mask.sum().item()
    torch.testing.assert_close(mean, rows.mean(0), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(var, rows.var(0, unbiased=False), rtol=1e-6, atol=1e-7)
    exact = [t.double().requires_grad_() for t in (torch.nan_to_num(x), w, b)]
    expected = ops.batch_norm_train_reference(*exact, mask)[0]
    assert (y.movedim(1, -1)[~mask] == 0).all()
    assert_forward(y, expected.detach(), b.double().abs()[:, None, None] + 1)
    g = in_layout(randn(3, 20, 9, 7, dtype=dtype, seed=4), last)
    for d, e in zip(torch.autograd.grad(y, mine, g), torch.autograd.grad(expected, exact, g.double()), strict=True):
        assert_gradient(d, e, dtype, terms=1 if e.dim() > 1 else 9)
    line = torch.tensor([[[3.0, 5.0, 0.0, 0.0]]])
    assert ops.batch_norm_train(line, mask=torch.tensor([[True, True, False, False]]))[1].item() == 4


def test_running_statistics() -> None:
    for last in (False, True):
        x = in_layout(randn(4, 10, 6, 5), last)
        mine, theirs = torch.nn.BatchNorm2d(10), torch.nn.BatchNorm2d(10)
        for momentum in (0.1, 1.0, 0.25):
            theirs.momentum = momentum
            theirs(x)
            _, mean, var, count = ops.batch_norm_train(x)
            version = mine.running_mean._version
            ops.update_running(mine.running_mean, mine.running_var, mean, var, count, momentum)
            assert mine.running_mean._version > version
        torch.testing.assert_close(mine.running_mean, theirs.running_mean)
        torch.testing.assert_close(mine.running_var, theirs.running_var)
    before = mine.running_mean.clone()
    _, mean, var, count = ops.batch_norm_train(torch.empty(0, 10, 6, 5))
    ops.update_running(mine.running_mean, mine.running_var, mean, var, count, 0.1)
    assert torch.equal(before, mine.running_mean)  # an empty batch does not count


def test_parameter_dtypes_and_given_statistics() -> None:
    x = randn(2, 12, 4, 4, dtype=torch.bfloat16)
    for dtype in DTYPES:
        w, b = randn(12, dtype=dtype, seed=1).requires_grad_(), randn(12, dtype=dtype, seed=2).requires_grad_()
        for f, plain in OPERATORS.values():
            y = f(x, w, b)
            exact = plain(x.double(), w.detach().double(), b.detach().double())
            assert y.dtype == torch.bfloat16
            assert_forward(y, exact, b.detach().double().abs()[:, None, None] + 4)
            dw, db = torch.autograd.grad(y.sum(), (w, b))
            assert dw.dtype == dtype and db.dtype == dtype
    xg = x.float().requires_grad_()
    mean, var = MEAN(12).requires_grad_(), VAR(12)
    (dm,) = torch.autograd.grad(ops.batch_norm(xg, mean, var).sum(), mean)  # given statistics may want a gradient
    assert dm.abs().sum() > 0


def test_empty_and_bad() -> None:
    for shape in ((0, 6, 3, 3), (2, 6, 0, 3), (0, 6)):
        x = torch.randn(shape, requires_grad=True)
        w = torch.ones(6, requires_grad=True)
        for f, _ in OPERATORS.values():
            y = f(x, w, None)
            assert y.shape == x.shape
            dx, dw = torch.autograd.grad(y.sum(), (x, w))
            assert dx.shape == x.shape and (dw == 0).all()
    with pytest.raises(ValueError, match="groups"):
        ops.group_norm(torch.randn(2, 6, 3), groups=4)
    with pytest.raises(ValueError, match="weight has shape"):
        ops.instance_norm(torch.randn(2, 6, 3), torch.ones(5))
    with pytest.raises(ValueError, match="dims"):
        ops.batch_norm_train(torch.randn(5))


def test_other_strides() -> None:
    base = randn(4, 12, 10, 9)
    for x in (
        base[::2],
        base[:, ::2],
        base.transpose(2, 3),
        base[:, :1].expand(4, 12, 10, 9),
        base.permute(3, 1, 2, 0),
    ):
        w = randn(x.shape[1], seed=1)
        for f, _ in OPERATORS.values():
            y = f(x, w, None)
            assert torch.equal(y, f(x.contiguous(), w, None))
            xg = x.detach().requires_grad_()
            g = randn(*x.shape, seed=2).transpose(-1, -2).contiguous().transpose(-1, -2)
            (d,) = torch.autograd.grad(f(xg, w, None), xg, g)
            xc = x.contiguous().requires_grad_()
            assert torch.equal(d, torch.autograd.grad(f(xc, w, None), xc, g)[0])


def test_out() -> None:
    for last in (False, True):
        x = in_layout(randn(2, 8, 5, 4), last)
        w, b = randn(8, seed=1), randn(8, seed=2)
        out = torch.empty_like(x)
        assert torch.equal(ops.group_norm_out(x, w, b, 4, out=out), ops.group_norm(x, w, b, 4))
        mean, var = MEAN(8), VAR(8)
        assert torch.equal(ops.batch_norm_out(x, mean, var, w, b, out=out), ops.batch_norm(x, mean, var, w, b))
        stats = [torch.empty(8, dtype=torch.float64) for _ in range(2)] + [torch.empty((), dtype=torch.float64)]
        ops.batch_norm_train_out(x, w, b, out=out, mean=stats[0], variance=stats[1], count=stats[2])
        for a, e in zip((out, *stats), ops.batch_norm_train(x, w, b), strict=True):
            assert torch.equal(a, e)
        assert torch.equal(ops.channel_layer_norm_out(x, w, b, out=out), ops.channel_layer_norm(x, w, b))
        other = torch.empty(2, 8, 5, 4) if last else torch.empty(2, 5, 4, 8).movedim(-1, 1)
        assert torch.equal(ops.group_norm_out(x, w, b, 4, out=other), ops.group_norm(x, w, b, 4))
