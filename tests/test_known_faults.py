"""Faults that users of other libraries met, each as the smallest input that shows it and the right answer."""

import math

import pytest
import torch

from normkit import functional as F
from normkit import nn
from normkit.reference import normalize
from normkit.spec import GEMMA, LLAMA, NEMOTRON

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def test_a_zero_weight_on_a_centred_gain_gives_x_over_rms_not_zero():
    x = torch.randn(3, 8, dtype=F64)
    wanted = x / x.square().mean(-1, keepdim=True).sqrt()
    for y in (
        F.rms_norm(x, 8, torch.zeros(8, dtype=F64), 1e-12, weight_offset=1.0),
        nn.RMSNorm(8, 1e-12, dtype=F64, weight_offset=1.0)(x),
        nn.build(GEMMA.replace(eps=1e-12), 8, dtype=F64)(x),
    ):
        torch.testing.assert_close(y, wanted)
    assert nn.RMSNorm(8, weight_offset=1.0).weight.abs().max() == 0, "initialised at gain 1, not 2"
    assert nn.LayerNorm(8, weight_offset=1.0).weight.abs().max() == 0
    assert nn.BatchNorm1d(8, weight_offset=1.0).weight.abs().max() == 0
    assert nn.GroupNorm(2, 8, weight_offset=1.0).weight.abs().max() == 0


def test_one_plus_w_is_formed_in_float32():
    """w = 15.8125 in bfloat16: 1 + w is 16.8125, which bfloat16 would round to 16.75."""
    w = torch.full((4,), 15.8125, dtype=BF16)
    x = torch.ones(1, 4, dtype=BF16) * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=BF16)
    wide = x.float()
    assert F.rms_norm(wide, 4, w, 0.0, weight_offset=1.0).abs().tolist() == [[16.8125] * 4]
    nemotron = NEMOTRON.replace(eps=0.0, has_bias=False)
    assert F.norm(wide, nemotron, w).abs().tolist() == [[16.75] * 4], "the family's own module rounds it"


@pytest.mark.parametrize("w_dtype", [F64, F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", [F64, F32, BF16, torch.float16], ids=str)
def test_any_pair_of_dtypes_works_and_the_output_dtype_is_declared(x_dtype, w_dtype):
    """F.layer_norm raises for float32 x with bfloat16 weights on the CPU."""
    x, w = torch.randn(2, 6, 3).to(x_dtype), torch.rand(6).to(w_dtype)
    for y in (
        F.layer_norm(x, 6, w, w, channel_dim=1),
        F.rms_norm(x, 6, w, channel_dim=1),
        F.group_norm(x, 3, w, w),
        F.instance_norm(x, weight=w, bias=w),
        F.batch_norm(x, w.clone(), w.clone(), w, w, training=True),
        F.batch_norm(x, w, w, w, w),
    ):
        assert y.dtype == x_dtype
    assert F.rms_norm(x, 6, w, channel_dim=1, output_dtype="promoted").dtype == torch.promote_types(x_dtype, w_dtype)
    assert F.rms_norm(x, 6, w, channel_dim=1, output_dtype="weight").dtype == w_dtype


def test_the_order_of_casts_is_told_by_distance_to_both():
    """The two orders differ on a quarter of bfloat16 outputs, by up to 0.03: a tolerance of 1e-2 sees nothing."""
    torch.manual_seed(0)
    x, w = torch.randn(512, 256).to(BF16), (1 + 0.3 * torch.randn(256)).to(BF16)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    llama, gemma = wide.to(BF16) * w, (wide * w.float()).to(BF16)
    assert 0.15 < (llama != gemma).double().mean() < 0.4
    for ours, theirs in (
        (F.rms_norm(x, 256, w, 1e-6, rounding="before_gain"), llama),
        (F.rms_norm(x, 256, w, 1e-6, rounding="after_gain"), gemma),
        (F.norm(x, LLAMA, w), llama),
    ):  # a kernel sums in another order: of 1e5 values one in ten thousand may round to the other side
        assert (ours != theirs).double().mean() <= 1e-4
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)
    assert torch.equal(normalize(x, LLAMA, w), llama)


def test_ones_on_a_centred_gain_double_it_and_meta_initialisation_is_no_nan():
    with torch.device("meta"):
        module = nn.RMSNorm(8, weight_offset=1.0)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x), torch.nn.functional.rms_norm(x, (8,)))
    for module in (nn.BatchNorm2d(4, device="meta"), nn.GroupNorm(2, 4, device="meta"), nn.LayerNorm(4, device="meta")):
        fresh = module.to_empty(device="cpu")
        fresh.reset_parameters()
        assert all(torch.isfinite(t).all() for t in fresh.state_dict().values())
    doubled = nn.RMSNorm(8, weight_offset=1.0)
    torch.nn.init.ones_(doubled.weight)
    torch.testing.assert_close(doubled(x), 2 * torch.nn.functional.rms_norm(x, (8,)))


def test_eps_reaches_the_formula_and_none_is_the_compute_dtypes():
    """At mean square 4e-4, 1e-5 against 1e-6 scales by 1.1 %; eps=None is finfo(float32) for half types."""
    x = torch.full((1, 4), 0.02)
    ratio = (F.rms_norm(x, 4, eps=1e-6) / F.rms_norm(x, 4, eps=1e-5)).mean().item()
    assert ratio == pytest.approx(math.sqrt((4e-4 + 1e-5) / (4e-4 + 1e-6)), rel=1e-6)
    for dtype in (F32, BF16, torch.float16):
        small = torch.full((1, 4), 1e-4).to(dtype)
        exact = small.double() / (small.double().square() + torch.finfo(F32).eps).sqrt()
        assert F.rms_norm(small, 4)[0, 0].item() == pytest.approx(exact[0, 0].item(), rel=2**-8)
        assert F.rms_norm(small, 4)[0, 0].item() == pytest.approx(0.279, rel=0.01)
        assert F.rms_norm(small, 4, eps=1e-6)[0, 0].item() == pytest.approx(0.0995, rel=0.01)


def test_float16_squares_do_not_overflow():
    """x = 300: the square is beyond float16, the answer is 1."""
    x = torch.full((2, 8), 300.0, dtype=torch.float16)
    assert torch.equal(F.rms_norm(x, 8), torch.ones_like(x))
    pair = torch.tensor([[60000.0, -60000.0]], dtype=torch.float16)
    assert torch.equal(F.layer_norm(pair, 2), torch.tensor([[1.0, -1.0]], dtype=torch.float16))
    assert torch.equal(F.group_norm(pair[..., None], 1)[..., 0], F.layer_norm(pair, 2))


def test_float16_zeros_stay_zero_where_eps_vanishes_in_float16():
    """F.normalize's 1e-12 is 0 in float16, and 0 / 0 is NaN."""
    x = torch.zeros(2, 8, dtype=torch.float16, requires_grad=True)
    for eps in (1e-12, 1e-8):
        y = F.rms_norm(x, 8, eps=eps)
        assert torch.equal(y, torch.zeros_like(x))
        (grad,) = torch.autograd.grad((y * 1e-3).sum(), x)
        assert not torch.isnan(grad).any()


def test_a_mean_of_ten_thousand_with_a_spread_of_a_thousandth():
    """16 values 1e4 + i * 1e-3: torch's float32 layer norm errs by 0.098."""
    x = (1e4 + torch.arange(16) * 1e-3).view(1, 16).requires_grad_()
    exact = torch.nn.functional.layer_norm(x.double(), (16,))
    assert (F.layer_norm(x, 16) - exact).abs().max() < 1e-5
    for y in (
        F.group_norm(x.view(1, 2, 8), 1).view(1, 16),
        F.instance_norm(x.view(1, 1, 16)).view(1, 16),
        F.batch_norm(x.view(16, 1), None, None, training=True).view(1, 16),
    ):
        assert (y - exact).abs().max() < 1e-5
    g = torch.linspace(-1, 1, 16).square().view(1, 16)
    (grad,) = torch.autograd.grad((F.layer_norm(x, 16) * g).sum(), x)
    (wanted,) = torch.autograd.grad((exact * g).sum(), x)
    assert (grad - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("mean", [100, 1000, 2000])
def test_channels_last_group_norm_with_a_large_mean(mean):
    """torch errs by 0.015 at a mean of 100, by 1.9 at 1000 and by 1088 at 2000."""
    x = (torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0)) + mean).contiguous(
        memory_format=torch.channels_last
    )
    exact = torch.nn.functional.group_norm(x.double().contiguous(), 2)
    y = F.group_norm(x, 2)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert (y - exact).abs().max() < 1e-5
    instance = F.instance_norm(x)
    assert instance.is_contiguous(memory_format=torch.channels_last)
    assert (instance - torch.nn.functional.instance_norm(x.double())).abs().max() < 1e-5


def test_a_negative_eps_is_refused_everywhere():
    x = torch.randn(3, 4, 2)
    calls = [
        lambda eps: F.layer_norm(x, 2, eps=eps),
        lambda eps: F.rms_norm(x, 2, eps=eps),
        lambda eps: F.group_norm(x, 2, eps=eps),
        lambda eps: F.instance_norm(x, eps=eps),
        lambda eps: F.batch_norm(x, None, None, training=True, eps=eps),
        lambda eps: nn.LayerNorm(2, eps),
        lambda eps: nn.RMSNorm(2, eps),
        lambda eps: nn.GroupNorm(2, 4, eps),
        lambda eps: nn.BatchNorm1d(4, eps),
        lambda eps: nn.SyncBatchNorm(4, eps),
        lambda eps: nn.InstanceNorm1d(4, eps),
    ]
    for call in calls:
        for eps in (-1e-5, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=r"eps must be finite and >= 0; got"):
                call(eps)
        with pytest.raises(TypeError, match="eps must be a float"):
            call("1e-5")


@pytest.mark.parametrize("rounding", ["after_gain", "before_gain"])
@pytest.mark.parametrize("rows", [64, 512, 4096])
def test_bfloat16_weight_gradients_over_many_rows(rows, rounding):
    """torch's layer norm is off by 8.5 % of its largest dweight at 4096 rows; under 0.5 % is easily had."""
    torch.manual_seed(0)
    x, g = torch.randn(rows, 32).to(BF16), (torch.randn(rows, 32) + 0.5).to(BF16)
    w, b = torch.ones(32, dtype=BF16), torch.zeros(32, dtype=BF16)

    def gradients(function, *tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = function(*leaves)
        return torch.autograd.grad(y, leaves, g.to(y.dtype))

    def layer(x, w, b):
        return F.layer_norm(x, 32, w, b, rounding=rounding)

    def rms(x, w, b):
        return F.rms_norm(x, 32, w, 1e-5, bias=b, rounding=rounding)

    for function in (layer, rms):
        ours = gradients(function, x, w, b)
        exact = gradients(function, x.double(), w.double(), b.double())
        for a, truth in zip(ours[1:], exact[1:], strict=True):
            assert ((a.double() - truth).abs() / truth.abs().max()).max() < 0.005


def test_row_norm_of_the_same_row_in_any_batch():
    """One row alone and among 256: the same bits, forward and backward (all norms: the catalog's suite)."""
    for width in (5, 64, 1000):
        for dtype in (F32, BF16):
            x, g = torch.randn(2, 256, width).to(dtype).unbind()
            x.requires_grad_()
            for norm in (lambda t, n=width: F.layer_norm(t, n), lambda t, n=width: F.rms_norm(t, n)):
                y = norm(x)
                (dx,) = torch.autograd.grad(y, x, g)
                for row in (0, 7, 255):
                    part = slice(row, row + 1)
                    alone = norm(x[part])
                    assert torch.equal(alone, y[part])
                    assert torch.equal(torch.autograd.grad(alone, x, g[part])[0][part], dx[part])


def test_the_layout_is_kept():
    """LayerNorm over the channels of NCHW needs no permutes, and channels_last stays."""
    x = torch.randn(2, 6, 4, 5).contiguous(memory_format=torch.channels_last)
    for y in (
        F.layer_norm(x, 6, channel_dim=1),
        F.rms_norm(x, 6, channel_dim=1),
        F.group_norm(x, 3),
        F.instance_norm(x),
        F.batch_norm(x, None, None, training=True),
    ):
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_the_backward_keeps_x_and_little_else():
    """Plain autograd would keep several float32 copies of a bfloat16 input."""
    kept = []

    def pack(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    x = torch.randn(512, 256, dtype=BF16, requires_grad=True)
    w = torch.ones(256, dtype=BF16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        F.rms_norm(x, 256, w, rounding="before_gain")
    assert sum(kept) < 1.1 * x.numel() * x.element_size()


def test_batch_norm_into_a_grouped_transposed_convolution(monkeypatch):
    """Its output channels lie on axis 1, cut into groups: scaling axis 0, or axis 1 alone, raises or is wrong."""
    from normkit.convert.fold import batch, fold_batch_norm

    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(6, 6, 3, groups=3), torch.nn.BatchNorm2d(6)).double().eval()
    with torch.no_grad():
        for tensor in (model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var):
            tensor.copy_(torch.rand(6) + 0.5)
    x = torch.randn(2, 6, 5, 5, dtype=F64)
    wanted, bits = model(x).detach(), model[0].weight.detach().clone()
    with monkeypatch.context() as patch:
        patch.setattr(batch, "scale_out", lambda weight, scale, _: weight * scale.view(-1, 1, 1, 1))
        receipt = fold_batch_norm(model, x)
        assert receipt.changed == () and "the proof failed" in receipt.refused[0].reason
        assert torch.equal(model[0].weight, bits) and torch.equal(model(x), wanted)
    receipt = fold_batch_norm(model, x)
    assert isinstance(model[1], torch.nn.Identity)
    assert (model(x) - wanted).abs().max() < 1e-12 * wanted.abs().max()
    receipt.undo()
    assert torch.equal(model[0].weight, bits) and torch.equal(model(x), wanted)
