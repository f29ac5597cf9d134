"""Norms by algebra: what must not change the result, and pairs that must agree.

float64 throughout, on shapes and values drawn by hypothesis; a shared mistake in a formula does not survive these.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normkit import functional as F
from normkit.reference import statistics
from normkit.spec import NormSpec

TINY = 1e-30  # an eps that scaling does not feel
# 64 float64 roundings on values of order sqrt(D), times the condition of a mean that was shifted by up to 100 spreads
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@st.composite
def tensors(draw, channels=None):
    n = draw(st.integers(2, 4))
    c = draw(st.sampled_from([2, 4, 6, 12])) if channels is None else channels
    space = draw(st.lists(st.integers(2, 4), min_size=1, max_size=2))
    seed = draw(st.integers(0, 2**20))
    scale, shift = draw(st.floats(0.01, 100)), draw(st.floats(-10, 10))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, c, *space, generator=g, dtype=torch.float64)
    return (x + shift) * scale


def batch(x, **options):
    return F.batch_norm(x, None, None, training=True, eps=TINY, **options)


FAMILIES = {
    "layer": lambda x: F.layer_norm(x, x.shape[1], eps=TINY, channel_dim=1),
    "rms": lambda x: F.rms_norm(x, x.shape[1], eps=TINY, channel_dim=1),
    "batch": batch,
    "instance": lambda x: F.instance_norm(x, eps=TINY),
    "group": lambda x: F.group_norm(x, 2, eps=TINY),
}
drawn = settings(max_examples=40, deadline=None)


@given(x=tensors(), scale=st.floats(1e-3, 1e3), sign=st.sampled_from([1.0, -1.0]))
@drawn
def test_every_norm_is_blind_to_scale_and_odd(x, scale, sign):
    for family, norm in FAMILIES.items():
        torch.testing.assert_close(norm(x * (scale * sign)), sign * norm(x), msg=family, **CLOSE)


@given(x=tensors(), seed=st.integers(0, 100))
@drawn
def test_every_centered_norm_is_blind_to_a_shift_of_its_set(x, seed):
    g = torch.Generator().manual_seed(seed)

    def shift(*shape):
        return 10 * torch.randn(*shape, generator=g, dtype=torch.float64) * x.std()

    ones = [1] * (x.dim() - 2)
    n, c = x.shape[:2]
    shifts = {
        "layer": shift(n, 1, *x.shape[2:]),
        "batch": shift(1, c, *ones),
        "instance": shift(n, c, *ones),
        "group": shift(n, 2, 1, *ones).expand(n, 2, c // 2, *ones).reshape(n, c, *ones),
    }
    for family, by in shifts.items():
        torch.testing.assert_close(FAMILIES[family](x + by), FAMILIES[family](x), msg=family, rtol=1e-7, atol=1e-7)
    assert not torch.allclose(FAMILIES["rms"](x + shifts["layer"]), FAMILIES["rms"](x), rtol=1e-3), "rms is not blind"


@given(x=tensors())
@drawn
def test_the_result_has_the_statistics_it_promises(x):
    spaces = tuple(range(2, x.dim()))
    for family, dims in {"layer": (1,), "batch": (0, *spaces), "instance": spaces}.items():
        y = FAMILIES[family](x)
        torch.testing.assert_close(y.mean(dims), torch.zeros_like(y.mean(dims)), msg=family, **CLOSE)
        torch.testing.assert_close(y.var(dims, correction=0), torch.ones_like(y.mean(dims)), msg=family, **CLOSE)
    y = FAMILIES["rms"](x)
    torch.testing.assert_close(y.square().mean(1), torch.ones_like(y[:, 0]), **CLOSE)


@given(x=tensors())
@drawn
def test_every_norm_is_idempotent(x):
    for family, norm in FAMILIES.items():
        torch.testing.assert_close(norm(norm(x)), norm(x), msg=family, **CLOSE)


@given(x=tensors(), seed=st.integers(0, 100))
@drawn
def test_permuting_what_shares_a_statistic_permutes_the_result(x, seed):
    g = torch.Generator().manual_seed(seed)
    by = {"layer": 1, "rms": 1, "batch": 0, "instance": 2, "group": 2}
    for family, dim in by.items():
        order = torch.randperm(x.shape[dim], generator=g)
        norm = FAMILIES[family]
        torch.testing.assert_close(
            norm(x.index_select(dim, order)), norm(x).index_select(dim, order), msg=family, **CLOSE
        )


@given(x=tensors(), eps=st.sampled_from([1e-12, 1e-5, 1e-1]))
@drawn
def test_layer_norm_is_rms_norm_of_the_centred_input(x, eps):
    centred = x - x.mean(1, keepdim=True)
    c = x.shape[1]
    torch.testing.assert_close(
        F.layer_norm(x, c, eps=eps, channel_dim=1), F.rms_norm(centred, c, eps=eps, channel_dim=1), **CLOSE
    )


@given(x=tensors(), eps=st.sampled_from([1e-12, 1e-5, 1e-1]))
@drawn
def test_group_norms_two_limits(x, eps):
    """As many groups as channels are instance norm; one group is layer norm over channels and space."""
    torch.testing.assert_close(F.group_norm(x, x.shape[1], eps=eps), F.instance_norm(x, eps=eps), **CLOSE)
    torch.testing.assert_close(F.group_norm(x, 1, eps=eps), F.layer_norm(x, tuple(x.shape[1:]), eps=eps), **CLOSE)


@given(x=tensors())
@drawn
def test_mean_square_is_variance_plus_squared_mean(x):
    layer = statistics(x, NormSpec(channel_dim=1))
    rms = statistics(x, NormSpec(channel_dim=1, centered=False))
    torch.testing.assert_close(rms.square, layer.square + layer.mean.square(), **CLOSE)


@given(x=tensors(channels=6))
@drawn
def test_batch_norm_is_instance_norm_of_the_batch_laid_out_in_space(x):
    laid_out = x.movedim(1, 0).reshape(1, x.shape[1], -1)
    y = F.instance_norm(laid_out, eps=1e-5).reshape(x.shape[1], x.shape[0], *x.shape[2:]).movedim(0, 1)
    torch.testing.assert_close(F.batch_norm(x, None, None, training=True), y, **CLOSE)


@given(x=tensors(), offset=st.sampled_from([1.0, 0.5]))
@drawn
def test_an_offset_is_the_same_as_a_gain_that_has_it_in(x, offset):
    c = x.shape[1]
    w = torch.linspace(-1, 1, c, dtype=torch.float64)
    calls = {
        "layer": lambda w, o: F.layer_norm(x, c, w, channel_dim=1, weight_offset=o),
        "rms": lambda w, o: F.rms_norm(x, c, w, channel_dim=1, weight_offset=o),
        "batch": lambda w, o: batch(x, weight=w, weight_offset=o),
        "instance": lambda w, o: F.instance_norm(x, weight=w, weight_offset=o),
        "group": lambda w, o: F.group_norm(x, 2, w, weight_offset=o),
    }
    for family, call in calls.items():
        torch.testing.assert_close(call(w, offset), call(w + offset, 0.0), msg=family, **CLOSE)


@given(x=tensors(channels=12), groups=st.sampled_from([2, 3, 4]))
@drawn
def test_groups_of_features_are_norms_of_their_own(x, groups):
    y = F.rms_norm(x, 12, channel_dim=1, groups=groups)
    parts = [F.rms_norm(part, 12 // groups, channel_dim=1) for part in x.chunk(groups, 1)]
    torch.testing.assert_close(y, torch.cat(parts, 1), **CLOSE)


@given(x=tensors(channels=6))
@drawn
def test_gradients_are_orthogonal_to_what_the_norm_is_blind_to(x):
    """A norm that does not feel scale (or a shift) sends no gradient along x (or along ones)."""
    for family, dim in {
        "layer": 1,
        "rms": 1,
        "batch": (0, *range(2, x.dim())),
        "instance": tuple(range(2, x.dim())),
    }.items():
        given_x = x.clone().requires_grad_()
        weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape)
        (grad,) = torch.autograd.grad((FAMILIES[family](given_x) * weights).sum(), given_x)
        slope = grad.norm() + weights.norm() / x.std()  # its terms, which may cancel altogether (two values)
        size = slope * x.norm()
        assert (grad * x).sum(dim).abs().max() <= 1e-9 * size, family
        if family != "rms":
            assert grad.sum(dim).abs().max() <= 1e-9 * slope * x.numel() ** 0.5, family
