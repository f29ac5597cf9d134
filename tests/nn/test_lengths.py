"""ScaleNorm, L2Norm and PixelNorm against their equations."""

import math

import pytest
import torch
from transcribe import assert_agree, randn, trained

from normkit.functional import other as E
from normkit.nn import L2Norm, PixelNorm, ScaleNorm


def length(values):
    return torch.sqrt(sum(v * v for v in values))


def test_scale_norm_is_equation_of_1910_05895():
    m = trained(ScaleNorm(7, dtype=torch.float64))

    def paper(x):  # g * x / ||x||
        return torch.stack([torch.stack([m.weight[0] * v / length(row) for v in row]) for row in x])

    assert_agree(m, [randn(4, 7)], paper)
    assert ScaleNorm(16).weight.item() == 4.0  # starts at sqrt(d)


def test_l2_norm_divides_each_position_by_its_length():
    m = trained(L2Norm(3, init=20.0, channel_dim=1, dtype=torch.float64))

    def loops(x):
        out = torch.empty_like(x)
        for n in range(x.shape[0]):
            for i in range(x.shape[2]):
                size = length(x[n, :, i])
                for c in range(x.shape[1]):
                    out[n, c, i] = m.weight[c] * x[n, c, i] / size
        return out

    assert_agree(m, [randn(2, 3, 5)], loops)


def test_pixel_norm_is_equation_of_1710_10196():
    def paper(x):  # b_xy = a_xy / sqrt(1/N sum_j (a_xy^j)^2 + 1e-8)
        out = torch.empty_like(x)
        for n in range(x.shape[0]):
            for i in range(x.shape[2]):
                for j in range(x.shape[3]):
                    pixel = x[n, :, i, j]
                    out[n, :, i, j] = pixel / torch.sqrt(sum(v * v for v in pixel) / len(pixel) + 1e-8)
        return out

    assert_agree(PixelNorm(), [randn(2, 5, 3, 2)], paper)


@pytest.mark.parametrize("make", [ScaleNorm, L2Norm])
def test_float16_zeros_stay_zero_and_large_values_do_not_overflow(make):
    m = make(64)
    assert torch.equal(m(torch.zeros(2, 64, dtype=torch.float16)), torch.zeros(2, 64, dtype=torch.float16))
    large = torch.full((2, 64), 300.0, dtype=torch.float16)
    expected = m.weight.max().item() / math.sqrt(64)
    torch.testing.assert_close(m(large).float(), torch.full((2, 64), expected), rtol=1e-3, atol=0)


def test_short_rows_are_divided_by_eps():
    x = torch.full((1, 4), 1e-9)
    torch.testing.assert_close(E.scale_norm(x, eps=1e-5), x / 1e-5)
    torch.testing.assert_close(E.l2_norm(x, eps=1e-5), x / 1e-5)


def test_lengths_beyond_the_square_of_float32():
    x = torch.tensor([[3e30, 4e30]])
    torch.testing.assert_close(L2Norm()(x), torch.tensor([[0.6, 0.8]]))


def test_weightless():
    m = ScaleNorm(4, elementwise_affine=False)
    assert m.weight is None and not list(m.parameters())
    torch.testing.assert_close(m(torch.ones(1, 4)), torch.full((1, 4), 0.5))


def test_specs():
    assert L2Norm().spec.kind == "l2" and ScaleNorm(4).spec.weight_shape == "scalar"
    assert PixelNorm().spec.kind == "rms" and PixelNorm().spec.channel_dim == 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ScaleNorm(4, eps=-1.0), ValueError, "eps"),
        (lambda: ScaleNorm(4)(torch.ones(2, 5)), ValueError, "features=4"),
        (lambda: L2Norm(4)(torch.ones(2, 5)), ValueError, "weight"),
        (lambda: L2Norm(4, init=math.inf), ValueError, "init"),
        (lambda: PixelNorm(eps=math.nan), ValueError, "eps"),
        (lambda: PixelNorm()(torch.ones(3)), ValueError, "at least 2 dims"),
        (lambda: ScaleNorm(True), TypeError, "features"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
