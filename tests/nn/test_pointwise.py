"""DynamicTanh, Derf and LayerScale against their equations, written out element by element."""

import math

import pytest
import torch
from transcribe import assert_agree, randn, trained

from normkit.functional import other as E
from normkit.nn import Derf, DynamicTanh, LayerScale


def over_rows(x, one):
    """Apply ``one(value, feature index)`` to each element of (..., C)."""
    rows = [torch.stack([one(row[c], c) for c in range(x.shape[-1])]) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape)


def test_dynamic_tanh_is_equation_of_2503_10622():
    m = trained(DynamicTanh(7, dtype=torch.float64))

    def paper(x):  # gamma * tanh(alpha x) + beta, with tanh from exponentials
        def one(value, c):
            e = torch.exp(2 * m.alpha[0] * value)
            return m.weight[c] * (e - 1) / (e + 1) + m.bias[c]

        return over_rows(x, one)

    assert_agree(m, [randn(3, 2, 7)], paper)


def test_derf_is_equation_of_2512_10938():
    m = trained(Derf(5, dtype=torch.float64))

    def paper(x):  # gamma * erf(alpha x + s) + beta, with erf from its Maclaurin series
        def one(value, c):
            z = m.alpha[0] * value + m.shift[0]
            series = sum((-1) ** n * z ** (2 * n + 1) / float(math.factorial(n) * (2 * n + 1)) for n in range(40))
            return m.weight[c] * 2 / math.sqrt(math.pi) * series + m.bias[c]

        return over_rows(x, one)

    assert_agree(m, [randn(3, 5)], paper)


def test_layer_scale_is_equation_of_2103_17239():
    m = trained(LayerScale(5, dtype=torch.float64))
    assert_agree(m, [randn(2, 3, 5)], lambda x: over_rows(x, lambda value, c: m.weight[c] * value))


@pytest.mark.parametrize("make", [DynamicTanh, Derf, LayerScale])
def test_channels_first_is_channels_last_moved(make):
    first = trained(make(5, channel_dim=1))
    last = make(5)
    last.load_state_dict(first.state_dict())
    x = randn(2, 5, 3, 4, dtype=torch.float32)
    torch.testing.assert_close(first(x), last(x.movedim(1, -1)).movedim(-1, 1), rtol=0, atol=0)


def test_normalized_shape_of_two_dims():
    m = trained(DynamicTanh((3, 4), dtype=torch.float64))
    x = randn(2, 3, 4)
    torch.testing.assert_close(m(x), torch.tanh(m.alpha * x) * m.weight + m.bias)


def test_starting_values():
    assert (DynamicTanh(3).alpha.item(), Derf(3).alpha.item(), Derf(3).shift.item()) == (0.5, 0.5, 0.0)
    assert torch.equal(LayerScale(3, 0.1).weight, torch.full((3,), 0.1))
    assert list(Derf(3).state_dict()) == ["alpha", "weight", "bias", "shift"]


def test_without_affine_alpha_is_still_learned():
    for m in (DynamicTanh(4, elementwise_affine=False), Derf(4, elementwise_affine=False)):
        assert m.weight is None and m.bias is None
        m(randn(2, 4, dtype=torch.float32)).sum().backward()
        assert m.alpha.grad.abs() > 0
    assert DynamicTanh(4, bias=False).bias is None


def test_half_precision_rounds_once():
    for dtype in (torch.float16, torch.bfloat16):
        m = trained(DynamicTanh(64, dtype=dtype))
        x = randn(8, 64, dtype=dtype) * 3
        exact = (torch.tanh(m.alpha.float() * x.float()) * m.weight.float() + m.bias.float()).to(dtype)
        assert torch.equal(m(x), exact)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: DynamicTanh(4, alpha_init=math.nan), ValueError, "alpha_init"),
        (lambda: DynamicTanh(4, channel_dim=2), ValueError, "channel_dim"),
        (lambda: DynamicTanh((4, 5), channel_dim=1), ValueError, "one feature dim"),
        (lambda: LayerScale(0), ValueError, "features"),
        (lambda: LayerScale(2.0), TypeError, "features"),
        (lambda: DynamicTanh(4)(torch.ones(2, 5)), ValueError, r"weight has shape \(4,\).*needs \(5,\)"),
        (lambda: DynamicTanh(4)(torch.ones(2, 4, dtype=torch.int64)), TypeError, "floating"),
        (lambda: E.dynamic_tanh(torch.ones(2), torch.ones(2)), ValueError, "alpha must be one number"),
        (lambda: E.derf(torch.ones(2), torch.ones(1), torch.ones(2)), ValueError, "shift must be one number"),
        (lambda: LayerScale(4, device="meta")(torch.ones(2, 4)), ValueError, "weight is on meta"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
