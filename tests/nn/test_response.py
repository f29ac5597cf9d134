"""FilterResponseNorm, TLU and GlobalResponseNorm against their equations."""

import pytest
import torch
from transcribe import assert_agree, randn, trained

from normkit.nn import TLU, FilterResponseNorm, GlobalResponseNorm


def filter_response(m, x, mask=None):
    """y = gamma x / sqrt(nu^2 + eps) + beta, z = max(y, tau), pixel by pixel."""
    eps = 1e-6 + (m.learned_eps[0].abs() if m.learned_eps is not None else 0)
    out = torch.zeros_like(x)
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            where = [(i, j) for i in range(x.shape[2]) for j in range(x.shape[3]) if mask is None or mask[n, i, j]]
            nu2 = sum(x[n, c, i, j] ** 2 for i, j in where) / max(len(where), 1)
            for i, j in where:
                y = m.weight[c] * x[n, c, i, j] / torch.sqrt(nu2 + eps) + m.bias[c]
                out[n, c, i, j] = y if m.tau is None or y > m.tau[c] else m.tau[c]
    return out


@pytest.mark.parametrize("learned_eps", [None, 1e-4, 0.5])
@pytest.mark.parametrize("tlu", [True, False])
def test_filter_response_norm_is_equation_of_1911_09737(tlu, learned_eps):
    m = trained(FilterResponseNorm(3, dtype=torch.float64, tlu=tlu, learned_eps=learned_eps))
    assert_agree(m, [randn(2, 3, 3, 2)], lambda x: filter_response(m, x))


@pytest.mark.parametrize("learned_eps", [None, 0.5])
def test_masked_positions_do_not_count(learned_eps):
    m = trained(FilterResponseNorm(3, dtype=torch.float64, learned_eps=learned_eps))
    mask = torch.tensor([[[1, 1], [0, 1], [0, 0]], [[0, 0], [0, 0], [0, 0]]]).bool()
    assert_agree(m, [randn(2, 3, 3, 2)], lambda x: filter_response(m, x, mask), mask=mask)
    x = randn(2, 3, 3, 2)
    clean = m(x, mask=mask)
    x = torch.where(mask.unsqueeze(1), x, torch.nan).requires_grad_()
    y = m(x, mask=mask)
    assert torch.equal(y, clean)
    y.sum().backward()
    assert x.grad.isfinite().all() and m.weight.grad.isfinite().all()


def test_learned_eps_does_not_overflow():
    x = torch.full((1, 1, 2, 2), 1e30)
    m = FilterResponseNorm(1, learned_eps=1e-4)
    torch.testing.assert_close(m(x), torch.ones_like(x))


def test_tlu():
    m = trained(TLU(3, dtype=torch.float64))
    x = randn(2, 3, 4)
    loops = torch.stack([torch.stack([torch.maximum(s[c], m.tau[c]) for c in range(3)]) for s in x])
    assert torch.equal(m(x), loops)
    assert torch.equal(TLU(3)(x.float()), torch.relu(x.float()))


def global_response(m, x):
    """Gx = ||x_c||, Nx = Gx / (mean_c Gx + eps), y = gamma * x * Nx + beta + x, for (N, H, W, C)."""
    out = torch.empty_like(x)
    for n in range(x.shape[0]):
        channels = range(x.shape[3])
        g = [torch.sqrt(sum(v**2 for v in x[n, :, :, c].flatten())) for c in channels]
        average = sum(g) / len(g)
        for c in channels:
            out[n, :, :, c] = m.weight[c] * x[n, :, :, c] * g[c] / (average + 1e-6) + m.bias[c] + x[n, :, :, c]
    return out


def test_global_response_norm_is_equation_of_2301_00808():
    m = trained(GlobalResponseNorm(3, dtype=torch.float64))
    assert_agree(m, [randn(2, 2, 3, 3)], lambda x: global_response(m, x))
    first = GlobalResponseNorm(3, dtype=torch.float64, channel_dim=1)
    first.load_state_dict(m.state_dict())
    assert_agree(first, [randn(2, 3, 2, 3)], lambda x: global_response(first, x.movedim(1, -1)).movedim(-1, 1))


def test_global_response_norm_is_transformers_convnext_v2():
    from transformers.models.convnextv2.modeling_convnextv2 import ConvNextV2GRN

    theirs, ours = trained(ConvNextV2GRN(6)), GlobalResponseNorm(6)
    ours.load_state_dict({name: value.flatten() for name, value in theirs.state_dict().items()})
    x = randn(2, 4, 5, 6, dtype=torch.float32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_global_response_norm_starts_as_the_identity_and_survives_silence():
    m = GlobalResponseNorm(4)
    x = randn(2, 3, 3, 4, dtype=torch.float32)
    assert torch.equal(m(x), x)
    silent = torch.zeros(1, 3, 3, 4, requires_grad=True)
    for eps in (1e-6, 0.0):
        m = trained(GlobalResponseNorm(4, eps=eps))
        m(silent).sum().backward()
        assert silent.grad.isfinite().all()
    assert trained(GlobalResponseNorm(4))(torch.ones(2, 0, 3, 4)).shape == (2, 0, 3, 4)
    large = torch.full((1, 2, 2, 4), 1e30)
    assert trained(GlobalResponseNorm(4))(large).isfinite().all()


def test_weightless():
    for m in (
        FilterResponseNorm(3, elementwise_affine=False, tlu=False),
        GlobalResponseNorm(3, elementwise_affine=False),
    ):
        assert not list(m.parameters())
    x = randn(2, 4, 4, 3, dtype=torch.float32)
    response = x.norm(dim=(1, 2), keepdim=True)
    share = response / response.mean(-1, keepdim=True)
    torch.testing.assert_close(GlobalResponseNorm(3, elementwise_affine=False)(x), x * share + x)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: FilterResponseNorm(3, eps=-1e-6), ValueError, "eps"),
        (lambda: FilterResponseNorm(3, learned_eps=-1.0), ValueError, "learned_eps"),
        (lambda: FilterResponseNorm(3)(torch.ones(2, 3)), ValueError, "space dim"),
        (lambda: FilterResponseNorm(3)(torch.ones(2, 4, 5)), ValueError, "weight has shape"),
        (lambda: FilterResponseNorm(3)(torch.ones(2, 3, 5), mask=torch.ones(2, 3)), ValueError, "mask has shape"),
        (lambda: GlobalResponseNorm(3, channel_dim=0), ValueError, "channel_dim"),
        (lambda: GlobalResponseNorm(3)(torch.ones(2, 3)), ValueError, "space dim"),
        (lambda: TLU(3)(torch.ones(2, 3, dtype=torch.int32)), TypeError, "floating"),
        (lambda: TLU(0), ValueError, "num_features"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
