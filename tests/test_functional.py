"""What the functions add to torch's: residual sums, gates, out=, per-head gains, any rank, conventions by keyword."""

import inspect

import pytest
import torch

from normkit import functional as F
from normkit import nn, ops
from normkit.reference import normalize
from normkit.spec import ANNOTATED_LAYER, L2_NORMALIZE, TORCH_RMS, NormSpec

torch.manual_seed(0)
X, R, G = torch.randn(3, 2, 6, 4).unbind()
W, B = torch.randn(2, 6).unbind()

FAMILIES = {
    "layer": lambda x, **o: F.layer_norm(x, 6, W, B, channel_dim=1, **o),
    "rms": lambda x, **o: F.rms_norm(x, 6, W, 1e-6, bias=B, channel_dim=1, **o),
    "group": lambda x, **o: F.group_norm(x, 3, W, B, **o),
    "instance": lambda x, **o: F.instance_norm(x, weight=W, bias=B, **o),
    "batch": lambda x, **o: F.batch_norm(x, None, None, W, B, training=True, **o),
}
every = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"])
def test_positional_arguments_and_defaults_are_torchs(name):
    theirs = inspect.signature(getattr(torch.nn.functional, name)).parameters
    ours = inspect.signature(getattr(F, name)).parameters
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize("name", [n for n in nn.__all__ if hasattr(torch.nn, n)])
def test_constructors_are_torchs(name):
    theirs = inspect.signature(getattr(torch.nn, name)).parameters
    ours = inspect.signature(getattr(nn, name)).parameters
    positional = [(p.name, p.default) for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = [(p.name, p.default) for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(wanted)] == wanted
    assert all(p.name in ours for p in theirs.values())


@every
def test_a_residual_sum_is_rounded_to_the_streams_dtype_first(family):
    norm = FAMILIES[family]
    y, stream = norm(X, residual=R)
    torch.testing.assert_close(stream, X + R)
    torch.testing.assert_close(y, norm(X + R))
    x, wide = X.bfloat16(), R.float()
    y, stream = norm(x, residual=wide)
    assert stream.dtype == torch.float32 and y.dtype == torch.bfloat16
    torch.testing.assert_close(y, norm(x.float() + wide).bfloat16())
    _, narrow = norm(X, residual=R.bfloat16())
    assert torch.equal(narrow, (X + R.bfloat16()).bfloat16())
    leaves = [t.clone().requires_grad_() for t in (X, R)]
    y, stream = norm(leaves[0], residual=leaves[1])
    gradients = torch.autograd.grad(y.pow(3).sum() + stream.pow(2).sum(), leaves)
    total = (X + R).requires_grad_()
    (wanted,) = torch.autograd.grad(norm(total).pow(3).sum() + total.pow(2).sum(), total)
    for gradient in gradients:
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("kind", [("silu", "after"), ("silu", "before"), ("sigmoid", "after"), ("sigmoid", "before")])
@every
def test_a_gate_multiplies_before_or_after(family, kind):
    norm = FAMILIES[family]
    activation = torch.nn.functional.silu if kind[0] == "silu" else torch.sigmoid
    y = norm(X, gate=G, gate_kind=kind)
    wanted = norm(X * activation(G)) if kind[1] == "before" else norm(X) * activation(G)
    torch.testing.assert_close(y, wanted)


@every
def test_out_receives_the_result(family):
    norm = FAMILIES[family]
    out = torch.empty_like(X)
    assert norm(X, out=out) is out
    assert torch.equal(out, norm(X))
    (y, stream), other = norm(X, residual=R, out=out), norm(X, residual=R)
    assert y is out and torch.equal(y, other[0]) and torch.equal(stream, other[1])


def test_normalized_shape_of_any_rank():
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for rank in (1, 2, 3, 4):
        shape = x.shape[-rank:]
        w, b = torch.randn(2, *shape, dtype=torch.float64).unbind()
        torch.testing.assert_close(F.layer_norm(x, shape, w, b), torch.nn.functional.layer_norm(x, shape, w, b))
        torch.testing.assert_close(F.rms_norm(x, shape, w, 1e-6), torch.nn.functional.rms_norm(x, shape, w, 1e-6))
        torch.testing.assert_close(nn.RMSNorm(shape, 1e-6).double()(x), F.rms_norm(x, shape, eps=1e-6))


def test_a_gain_per_head():
    x, w = torch.randn(2, 5, 3, 8), torch.randn(3, 8)
    torch.testing.assert_close(F.rms_norm(x, 8, w, 1e-6), F.rms_norm(x, 8, eps=1e-6) * w)
    torch.testing.assert_close(F.layer_norm(x, 8, w[:, None].expand(3, 1, 8)[:, 0]), F.layer_norm(x, 8) * w)


def test_partial_statistics_run_over_the_leading_features():
    """pRMSNorm (Zhang and Sennrich 2019): the first quarter stands for all."""
    x = torch.randn(3, 8, dtype=torch.float64)
    wanted = x / x[:, :2].square().mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(F.rms_norm(x, 8, eps=1e-30, partial=0.25), wanted)
    torch.testing.assert_close(nn.RMSNorm(8, 1e-30, partial=0.25, dtype=torch.float64)(x), wanted)


def test_eps_position_and_statistic_by_the_spec():
    x = torch.randn(3, 8, dtype=torch.float64)
    w, b = torch.randn(2, 8, dtype=torch.float64).unbind()
    centred = x - x.mean(1, keepdim=True)
    torch.testing.assert_close(F.norm(x, ANNOTATED_LAYER, w, b), w * centred / (x.std(1, keepdim=True) + 1e-6) + b)
    torch.testing.assert_close(F.norm(x, L2_NORMALIZE), torch.nn.functional.normalize(x, dim=1))
    unbiased = NormSpec(statistic="unbiased", eps=1e-5, has_weight=False, axes="batch", channel_dim=1)
    wanted = (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()
    torch.testing.assert_close(F.norm(x, unbiased), wanted)


def test_batch_norm_functional_changes_nothing_and_returns_what_batch_norm_writes():
    x = torch.randn(4, 6, 3)
    mean, var = torch.zeros(6), torch.ones(6)
    result = F.batch_norm_functional(x, mean, var, W, B, training=True, momentum=0.2)
    assert mean.abs().max() == 0 and torch.equal(var, torch.ones(6))
    y = F.batch_norm(x, mean, var, W, B, training=True, momentum=0.2)
    for a, b in zip(result, (y, mean, var), strict=True):
        assert torch.equal(a, b)
    kept = F.batch_norm_functional(x, mean, var, W, B)
    assert kept.running_mean is mean and kept.running_var is var
    assert torch.equal(kept.output, F.batch_norm(x, mean, var, W, B))


@every
def test_the_recorded_and_the_plain_forward_give_the_same_bits(family):
    x = X.clone().requires_grad_()
    y = FAMILIES[family](x)
    name = type(y.grad_fn).__name__
    assert name in ("ClosedFormBackward", "ToCopyBackward0") or any(
        f"{operator}Backward" == name for operator in ops.library.OPERATORS
    )
    with torch.no_grad():
        assert torch.equal(y, FAMILIES[family](X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", ["after_gain", "before_gain"])
def test_the_closed_form_is_autograd_through_the_reference(rounding, dtype):
    spec = TORCH_RMS.replace(rounding=rounding, weight_offset=1.0, has_bias=True)
    x, g = torch.randn(2, 40, 16).unbind()
    w, b = torch.randn(2, 16).unbind()
    results = []
    for function in (F.norm, normalize):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w, b)]
        y = function(leaves[0], spec, *leaves[1:])
        results.append(torch.autograd.grad(y, leaves, g.to(dtype)))
    exact = [t.to(dtype).double().requires_grad_() for t in (x, w, b)]
    truth = torch.autograd.grad(normalize(exact[0], spec, *exact[1:]), exact, g.to(dtype).double())
    for ours, plain, true in zip(*results, truth, strict=True):
        ours_off, plain_off = ((t.double() - true).abs().max() / true.abs().max() for t in (ours, plain))
        assert ours_off <= max(1.1 * plain_off, 2**-8 if dtype == torch.bfloat16 else 1e-6)
