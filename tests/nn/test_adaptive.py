"""AdaLayerNorm, adaLN-Zero and SeeDNorm against their equations."""

import pytest
import torch
from transcribe import assert_agree, randn, trained

from normkit.functional import other as E
from normkit.nn import AdaLayerNorm, AdaLayerNormZero, SeeDNorm


def condition_vectors(m, c, parts):
    silu = [v / (1 + torch.exp(-v)) for v in c]
    rows = [torch.stack(silu) @ row + b for row, b in zip(m.linear.weight, m.linear.bias, strict=True)]
    size = len(rows) // parts
    return [torch.stack(rows[i * size : (i + 1) * size]) for i in range(parts)]


def standardize(row, centered, eps=1e-6):
    mean = sum(row) / len(row) if centered else 0.0
    return (row - mean) / torch.sqrt(sum((v - mean) ** 2 for v in row) / len(row) + eps)


@pytest.mark.parametrize("centered", [True, False])
def test_ada_layer_norm_is_equation_of_2212_09748(centered):
    m = trained(AdaLayerNorm(5, 3, centered=centered, dtype=torch.float64))

    def paper(x, c):
        out = []
        for sample, vector in zip(x, c, strict=True):
            shift, scale = condition_vectors(m, vector, 2)
            out.append(torch.stack([standardize(t, centered) * (1 + scale) + shift for t in sample]))
        return torch.stack(out)

    assert_agree(m, [randn(2, 4, 5), randn(2, 3, seed=1)], paper)


def test_ada_layer_norm_zero_also_gives_the_gate():
    m = trained(AdaLayerNormZero(5, 3, dtype=torch.float64))

    def paper(x, c):
        out, gates = [], []
        for sample, vector in zip(x, c, strict=True):
            shift, scale, gate = condition_vectors(m, vector, 3)
            out.append(torch.stack([standardize(t, True) * (1 + scale) + shift for t in sample]))
            gates.append(gate[None])
        return torch.stack(out), torch.stack(gates)

    assert_agree(m, [randn(2, 4, 5), randn(2, 3, seed=1)], paper)


def test_a_condition_for_each_token():
    m = trained(AdaLayerNormZero(5, 3, dtype=torch.float64))
    x, c = randn(2, 4, 5), randn(2, 4, 3, seed=1)
    y, gate = m(x, c)
    assert gate.shape == (2, 4, 5)
    for t in range(4):
        one, one_gate = m(x[:, t : t + 1], c[:, t])
        torch.testing.assert_close(one[:, 0], y[:, t])
        torch.testing.assert_close(one_gate[:, 0], gate[:, t])


def test_two_adaln_zero_are_the_modulation_of_a_dit_block():
    """Rows [0, 3C) and [3C, 6C) of DiT's single linear map, in the order shift, scale, gate."""
    x, c = randn(2, 4, 5), randn(2, 3, seed=1)
    weight, bias = randn(30, 3, seed=2), randn(30, seed=3)
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (torch.nn.functional.silu(c) @ weight.T + bias).chunk(6, dim=1)
    plain = torch.nn.functional.layer_norm(x, (5,), eps=1e-6)
    for rows, shift, scale, gate in (
        (slice(0, 15), shift_a, scale_a, gate_a),
        (slice(15, 30), shift_m, scale_m, gate_m),
    ):
        m = AdaLayerNormZero(5, 3, dtype=torch.float64)
        m.load_state_dict({"linear.weight": weight[rows], "linear.bias": bias[rows]})
        y, g = m(x, c)
        torch.testing.assert_close(y, plain * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))
        torch.testing.assert_close(g, gate.unsqueeze(1))


def test_starts_as_the_plain_norm_with_a_closed_gate():
    x, c = randn(2, 4, 5, dtype=torch.float32), randn(2, 3, dtype=torch.float32)
    plain = torch.nn.functional.layer_norm(x, (5,), eps=1e-6)
    torch.testing.assert_close(AdaLayerNorm(5, 3)(x, c), plain)
    y, gate = AdaLayerNormZero(5, 3)(x, c)
    torch.testing.assert_close(y, plain)
    assert not gate.any()
    assert AdaLayerNorm(5, 3, bias=False).linear.bias is None


@pytest.mark.parametrize("heads", [1, 3])
def test_seed_norm_is_equation_of_2510_22777(heads):
    m = trained(SeeDNorm(6, heads=heads, dtype=torch.float64))

    def paper(x):  # [tanh(x . beta) alpha + gamma] * x / RMS(x)
        out, size = [], 6 // heads
        for row in x:
            rms = torch.sqrt(sum(v * v for v in row) / len(row) + 1e-6)
            gains = []
            for j in range(6):
                part = range(j // size * size, (j // size + 1) * size)
                gains.append(torch.tanh(sum(row[i] * m.beta[i] for i in part)) * m.alpha[j] + m.weight[j])
            out.append(torch.stack(gains) * row / rms)
        return torch.stack(out)

    assert_agree(m, [randn(4, 6)], paper)


def test_seed_norm_starts_as_an_rms_norm_and_keeps_a_trace_of_length():
    x = randn(4, 6, dtype=torch.float32)
    m = SeeDNorm(6)
    torch.testing.assert_close(m(x), torch.nn.functional.rms_norm(x, (6,), eps=1e-6))
    trained(m)
    assert (m(x) - m(3 * x)).abs().max() > 1e-2
    assert SeeDNorm(6, elementwise_affine=False).weight is None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: AdaLayerNorm(4, 0), ValueError, "condition_features"),
        (lambda: AdaLayerNorm(4, 3, eps=-1.0), ValueError, "eps"),
        (lambda: AdaLayerNorm(4, 3)(torch.ones(2, 5), torch.ones(2, 3)), ValueError, "features=4"),
        (lambda: AdaLayerNorm(4, 3)(torch.ones(2, 4), torch.ones(2, 4)), ValueError, "condition_features=3"),
        (lambda: AdaLayerNorm(4, 3)(torch.ones(2, 5, 4), torch.ones(3, 3)), ValueError, r"scale has shape \(3, 4\)"),
        (lambda: AdaLayerNorm(4, 3)(torch.ones(2, 4), torch.ones(2, 3).int()), TypeError, "condition"),
        (lambda: E.modulate(torch.ones(2, 4).int(), torch.ones(4), torch.ones(4)), TypeError, "floating"),
        (lambda: SeeDNorm(4, heads=3), ValueError, "heads=3"),
        (lambda: SeeDNorm(4)(torch.ones(2, 5)), ValueError, "beta has shape"),
        (lambda: E.seed_norm(torch.ones(4), None, torch.ones(4), torch.ones(4), heads=3), ValueError, "heads=3"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
