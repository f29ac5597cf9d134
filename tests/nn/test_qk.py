"""QKNorm: each scope against its equation and against the model families' own modules."""

import pytest
import torch
from transcribe import assert_agree, randn, trained

from normkit.nn import QKNorm


def rms(row, weight, eps=1e-6):
    return row / torch.sqrt(sum(v * v for v in row) / len(row) + eps) * weight


def test_head_scope_shares_one_gain():
    m = trained(QKNorm(4, dtype=torch.float64))

    def loops(q, k):
        return tuple(
            torch.stack([torch.stack([torch.stack([rms(h, w) for h in t]) for t in b]) for b in x])
            for x, w in ((q, m.q_norm.weight), (k, m.k_norm.weight))
        )

    assert_agree(m, [randn(2, 3, 5, 4), randn(2, 2, 1, 4, seed=1)], loops)


def test_per_head_scope_has_a_gain_for_each_head_in_both_layouts():
    m = trained(QKNorm(4, 3, 1, scope="per_head", dtype=torch.float64))
    assert m.q_norm.weight.shape == (3, 4) and m.k_norm.weight.shape == (1, 4)

    def loops(q, k):
        return tuple(
            torch.stack([torch.stack([torch.stack([rms(h, w[i]) for i, h in enumerate(t)]) for t in b]) for b in x])
            for x, w in ((q, m.q_norm.weight), (k, m.k_norm.weight))
        )

    q, k = randn(2, 5, 3, 4), randn(2, 6, 1, 4, seed=1)
    assert_agree(m, [q, k], loops)
    other = QKNorm(4, 3, 1, scope="per_head", layout="BHTD", dtype=torch.float64)
    other.load_state_dict(m.state_dict())
    swapped = other(q.transpose(1, 2), k.transpose(1, 2))
    for a, b in zip(swapped, m(q, k), strict=True):
        torch.testing.assert_close(a.transpose(1, 2), b)


def test_full_scope_has_one_statistic_over_all_heads():
    m = trained(QKNorm(4, 3, 1, scope="full", dtype=torch.float64))

    def loops(q, k):
        return tuple(
            torch.stack([torch.stack([rms(t, w) for t in b]) for b in x])
            for x, w in ((q, m.q_norm.weight), (k, m.k_norm.weight))
        )

    assert_agree(m, [randn(2, 5, 12), randn(2, 6, 4, seed=1)], loops)


def test_full_and_head_scopes_differ():
    """The axis is part of the convention: the two must not be taken for one another."""
    q = randn(1, 1, 3, 4, dtype=torch.float32) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    head = QKNorm(4)(q, q)[0]
    full = QKNorm(4, 3, scope="full")(q.flatten(2), q.flatten(2))[0].unflatten(-1, (3, 4))
    assert (head - full).abs().max() > 0.5


def family(name, attribute):
    import importlib

    return getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), attribute)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "attribute", "options"),
    [
        ("qwen3", "Qwen3RMSNorm", {"rounding": "before_gain", "output_dtype": "promoted"}),
        ("gemma3", "Gemma3RMSNorm", {"weight_offset": 1.0}),
        ("olmo2", "Olmo2RMSNorm", {"scope": "full"}),
    ],
)
def test_bit_equal_in_bfloat16_to_the_family(name, attribute, options, weights):
    width = 32 * 4 if options.get("scope") else 32
    theirs = trained(family(name, attribute)(width, eps=1e-6).to(weights), spread=0.2)
    heads = {"heads": 4} if options.get("scope") else {}
    ours = QKNorm(32, eps=1e-6, dtype=weights, **heads, **options)
    ours.q_norm.load_state_dict(theirs.state_dict())
    shape = (2, 50, 128) if options.get("scope") else (2, 50, 4, 32)
    q = randn(*shape, dtype=torch.bfloat16) * 3
    mine, other = ours(q, q)[0], theirs(q)
    assert mine.dtype == other.dtype and torch.equal(mine, other)


def test_bit_equal_to_cohere_with_a_gain_for_each_head():
    theirs = trained(family("cohere", "CohereLayerNorm")((4, 32), eps=1e-5).to(torch.bfloat16))
    ours = QKNorm(32, 4, scope="per_head", eps=1e-5, centered=True, dtype=torch.bfloat16)
    ours.q_norm.load_state_dict(theirs.state_dict())
    q = randn(2, 50, 4, 32, dtype=torch.bfloat16) * 3 + 1
    assert torch.equal(ours(q, q)[0], theirs(q))


def test_weightless_commutes_with_a_rotation():
    m = QKNorm(4, elementwise_affine=False, dtype=torch.float64)
    assert not list(m.parameters())
    q = randn(2, 3, 1, 4)
    rotation = torch.linalg.qr(randn(4, 4, seed=3)).Q
    torch.testing.assert_close(m(q @ rotation, q)[0], m(q, q)[0] @ rotation)


def test_keys_and_spec():
    m = QKNorm(4, weight_offset=1.0, bias=True, centered=True)
    assert list(m.state_dict()) == ["q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"]
    assert torch.equal(m.q_norm.weight, torch.zeros(4)) and m.spec.kind == "layer"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: QKNorm(4, scope="heads"), ValueError, "scope"),
        (lambda: QKNorm(4, layout="TBHD"), ValueError, "layout"),
        (lambda: QKNorm(4, 3), ValueError, "heads=3"),
        (lambda: QKNorm(4, scope="full"), ValueError, "needs heads"),
        (lambda: QKNorm(4, 3, scope="per_head", bias=True), ValueError, "bias"),
        (lambda: QKNorm(4, eps=-1.0), ValueError, "eps"),
        (lambda: QKNorm(0), ValueError, "head_dim"),
        (lambda: QKNorm(4)(torch.ones(2, 5), torch.ones(2, 4)), ValueError, "4 features"),
        (lambda: QKNorm(4, 3, scope="per_head")(torch.ones(2, 2, 4), torch.ones(2, 3, 4)), ValueError, "3 heads"),
        (lambda: QKNorm(4)(torch.ones(2, 4).int(), torch.ones(2, 4)), TypeError, "floating"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
