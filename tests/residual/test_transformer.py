"""The reference Transformer: finite at depth, cached decoding, masks, windows, precision, copies, bad input."""

from __future__ import annotations

import copy

import pytest
import torch

from normkit import NormSpec
from normkit.placement import known
from normkit.residual import KeyValueCache, Transformer, TransformerConfig
from normkit.spec import GEMMA, LLAMA, TORCH_LAYER

from .blocks import scramble

SMALL = {"vocab": 50, "dim": 32, "heads": 4, "depth": 3}


def tokens(batch=2, length=9):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(5))


def model(**fields):
    torch.manual_seed(0)
    return Transformer(**SMALL | fields)


@pytest.mark.parametrize("name", known())
def test_64_layers_are_finite(name):
    """Forward and backward at initialization; every parameter has a gradient, and some gradient is not zero."""
    base = 0.02 if name == "none" else "xavier_normal"
    made = model(depth=64, placement=name, kv_heads=2, base=base)
    logits = made(tokens(1, 5))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens(1, 5).flatten()).backward()
    assert torch.isfinite(logits).all()
    gradients = [p.grad for p in made.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert any(g.any() for g in gradients)


def test_64_layers_without_norm_overflow():
    """What the placements are for: gated branches on an unnormalized stream, Xavier at the start."""
    assert not torch.isfinite(model(depth=64, placement="none")(tokens(1, 5))).all()


@pytest.mark.parametrize("name", known())
def test_state_dict_round_trip(name):
    made, other = model(placement=name, tie_embeddings=False), model(placement=name, tie_embeddings=False)
    scramble(made)
    other.load_state_dict(made.state_dict())
    assert torch.equal(made(tokens()), other(tokens()))
    assert torch.equal(made(tokens()), copy.deepcopy(made)(tokens()))


@pytest.mark.parametrize(
    "name",
    [
        "resi_dual",
        "hybrid",
        "parallel",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("sub", "normformer", "fixup")),
    ],
)
def test_compile(name):
    """Whole models; every placement's branch is compiled on its own in the branch's tests."""
    made = model(placement=name, depth=2)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()), made(tokens()))


VARIANTS = {
    "plain": {},
    "grouped": {"kv_heads": 2, "qk_norm": "head"},
    "multi_query": {"kv_heads": 1, "qk_norm": "full", "placement": "output"},
    "window": {"windows": (3, None)},
    "softcap": {
        "attention_softcap": 1.5,
        "logit_softcap": 2.0,
        "windows": (4,),
        "norm": GEMMA,
        "placement": "sandwich",
    },
    "learned": {"positions": "learned", "norm": TORCH_LAYER, "gated": False, "act": "gelu", "attention_bias": True},
    "no_positions": {"positions": "none", "embedding_norm": True},
    "resi_dual": {"placement": "resi_dual"},
    "hybrid": {"placement": "hybrid"},
    "normformer": {"placement": "normformer"},
    "parallel": {"placement": "parallel", "shared_norm": False},
    "head_dim": {"head_dim": 12},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_decoding_equals_the_full_forward(name):
    made = model(**VARIANTS[name]).double().eval()
    scramble(made, 0.1)
    t = tokens()
    full = made(t)
    cache = KeyValueCache()
    parts = [made(t[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 6), (6, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-10, atol=1e-10)
    assert cache.length == t.shape[1]


@pytest.mark.parametrize("name", ["plain", "window", "softcap"])
def test_cached_decoding_with_padding(name):
    made = model(**VARIANTS[name]).double().eval()
    t = tokens()
    valid = torch.ones_like(t, dtype=torch.bool)
    valid[1, :2] = False
    full = made(t, mask=valid)
    cache = KeyValueCache()
    parts = [made(t[:, a:b], mask=valid[:, :b], cache=cache) for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(torch.cat(parts, 1)[valid], full[valid], rtol=1e-10, atol=1e-10)
    other = t.clone()
    other[1, :2] = 7
    torch.testing.assert_close(made(other, mask=valid)[valid], full[valid])


@pytest.mark.parametrize("name", VARIANTS)
def test_decoder_is_causal(name):
    made = model(**VARIANTS[name]).double().eval()
    scramble(made, 0.1)
    t = tokens()
    other = t.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 50
    a, b = made(t), made(other)
    torch.testing.assert_close(a[:, :6], b[:, :6], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(a[:, 6:], b[:, 6:])


def test_window_bounds_what_a_position_sees():
    made = model(depth=1, windows=(3,), positions="none").double().eval()
    t = tokens()
    other = t.clone()
    other[:, 0] = (other[:, 0] + 1) % 50
    changed = (made(t) - made(other)).abs().amax((0, 2)) > 1e-12
    assert changed.tolist() == [True] * 3 + [False] * 6


def test_encoder_sees_both_sides_and_masks_padding():
    made = model(kind="encoder", placement="post", token_types=2, positions="learned").double().eval()
    t = tokens()
    other = t.clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    assert not torch.allclose(made(t)[:, 0], made(other)[:, 0])
    valid = torch.ones_like(t)
    valid[:, -1] = 0
    torch.testing.assert_close(made(t, mask=valid)[:, :-1], made(other, mask=valid)[:, :-1])
    assert not torch.allclose(made(t), made(t, types=torch.ones_like(t)))


@pytest.mark.parametrize("name", ["post", "pre", "deepnorm", "sub", "resi_dual", "normformer"])
def test_encoder_decoder(name):
    made = model(kind="encoder_decoder", encoder_depth=2, placement=name).double().eval()
    scramble(made, 0.1)
    t, source = tokens(), tokens(2, 7).flip(1)
    full = made(t, source=source)
    cache = KeyValueCache()
    parts = [made(t[:, :5], source=source, cache=cache), made(t[:, 5:], cache=cache)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-10, atol=1e-10)
    seen = torch.ones_like(source)
    seen[:, -1] = 0
    other = source.clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    a, b = (made(t, source=s, source_mask=seen) for s in (source, other))
    torch.testing.assert_close(a, b)
    assert not torch.allclose(full, made(t, source=other))


def test_norm_of_any_spec():
    for spec in (LLAMA, GEMMA, TORCH_LAYER, NormSpec(has_weight=False)):
        made = model(norm=spec, qk_norm="head", embedding_norm=True)
        assert torch.isfinite(made(tokens())).all()


def test_float32_stream_of_a_bfloat16_model():
    made = model(stream_dtype=torch.float32, depth=6).bfloat16()
    dtypes = []
    made.stack.layers[3].attention.sublayer.register_forward_pre_hook(lambda m, a: dtypes.append(a[0].dtype))
    assert made(tokens()).dtype == torch.bfloat16
    assert dtypes == [torch.bfloat16]


def test_train_a_few_steps():
    """A tiny model learns to copy: the loss falls by half."""
    made = model(depth=2)
    t = tokens(8, 12)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(made(t)[:, :-1].flatten(0, 1), t[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"heads": 5}, "heads=5 does not divide dim=32"),
        ({"depth": 0}, "depth must be an integer >= 1; got 0"),
        ({"placement": "prenorm"}, "unknown placement"),
        ({"kind": "both"}, "kind must be one of"),
        ({"positions": "alibi"}, "positions must be one of"),
        ({"act": "swish"}, "activation must be one of"),
        ({"windows": ()}, "windows must hold"),
        ({"encoder_depth": 2}, "needs kind='encoder_decoder'"),
        ({"qk_norm": "both"}, "qk_norm must be"),
        ({"placement": "resi_dual", "final_norm": False}, "ends in a norm of its second stream"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        model(**fields)


def test_bad_calls():
    with pytest.raises(ValueError, match="10 positions exceed max_positions=8"):
        model(positions="learned", max_positions=8)(tokens(1, 10))
    with pytest.raises(ValueError, match="source needs kind"):
        model()(tokens(), source=tokens())
    with pytest.raises(ValueError, match="needs source"):
        model(kind="encoder_decoder")(tokens())
    with pytest.raises(ValueError, match=r"tokens must be \(B, T\)"):
        model()(tokens()[0])
    with pytest.raises(ValueError, match="not both; got dim"):
        Transformer(TransformerConfig(**SMALL), dim=8)
