"""Attention and feed-forward layers against straight-line float64 loops over positions and heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normkit.residual import Attention, FeedForward, KeyValueCache
from normkit.residual.attention import allowed, rotary_table

from .blocks import scramble

DIM, HEADS, SIZE, T = 12, 4, 6, 7


def make(features: int) -> nn.Module:
    return nn.RMSNorm(features, eps=1e-6, dtype=torch.float64)


def rms(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def turn(x, position, theta=10000.0):
    """Rotary positions on one vector, pair by pair: feature i with feature i + D / 2."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def straight(x, a: Attention, *, causal, window, rotary, qk, scale):
    """One sample (T, C), one head and one query at a time."""
    q, k, v = x @ a.query.weight.T, x @ a.key.weight.T, x @ a.value.weight.T
    if qk == "full":
        q, k = rms(q, a.query_norm), rms(k, a.key_norm)
    heads = []
    for h in range(a.heads):
        g = h * a.kv_heads // a.heads
        qh, kh, vh = q[:, h * SIZE : (h + 1) * SIZE], k[:, g * SIZE : (g + 1) * SIZE], v[:, g * SIZE : (g + 1) * SIZE]
        if qk == "head":
            qh, kh = rms(qh, a.query_norm), rms(kh, a.key_norm)
        if a.value_norm is not None:
            vh = rms(vh, a.value_norm)
        if rotary:
            qh, kh = (torch.stack([turn(row, n) for n, row in enumerate(t)]) for t in (qh, kh))
        rows = []
        for t in range(len(x)):
            seen = [s for s in range(len(x)) if not (causal and s > t) and (window is None or abs(t - s) < window)]
            scores = torch.stack([qh[t] @ kh[s] for s in seen]) * (scale or SIZE**-0.5)
            if a.softcap is not None:
                scores = a.softcap * (scores / a.softcap).tanh()
            weights = scores.exp() / scores.exp().sum()
            rows.append(sum(w * vh[s] for w, s in zip(weights, seen, strict=True)))
        y = torch.stack(rows)
        heads.append(y if a.head_scale is None else y * a.head_scale[h])
    y = torch.cat(heads, -1)
    y = y if a.inner_norm is None else rms(y, a.inner_norm)
    return y @ a.output.weight.T


@pytest.mark.parametrize("wanted", [(), ("inner",), ("qkv",), ("head_scale",), ("inner", "qkv", "head_scale")])
@pytest.mark.parametrize("qk", [None, "head", "full"])
@pytest.mark.parametrize(
    ("kv_heads", "softcap", "causal", "window", "rotary", "scale"),
    [
        (4, None, True, None, True, None),
        (2, 1.5, True, 3, True, 0.3),
        (1, None, False, None, False, None),
        (2, 0.7, False, 2, True, None),
    ],
)
def test_attention(wanted, qk, kv_heads, softcap, causal, window, rotary, scale):
    torch.manual_seed(0)
    a = Attention(
        DIM,
        HEADS,
        kv_heads=kv_heads,
        head_dim=SIZE,
        softcap=softcap,
        scale=scale,
        qk_norm=qk,
        make_norm=make,
        dtype=torch.float64,
    )
    a.adapt(wanted, make)
    scramble(a)
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    mask = allowed(T, T, causal=causal, window=window, valid=None, device=x.device)
    table = tuple(t.double() for t in rotary_table(torch.arange(T), SIZE, 10000.0)) if rotary else None
    got = a(x, mask=mask, causal=causal, rotary=table)
    norms = "head" if "qkv" in wanted else qk
    want = torch.stack(
        [straight(row, a, causal=causal, window=window, rotary=rotary, qk=norms, scale=scale) for row in x]
    )
    # The rotary table is made in float32, as model families make it.
    torch.testing.assert_close(got, want, rtol=1e-6 if rotary else 1e-11, atol=1e-6 if rotary else 1e-11)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("gated", [True, False])
def test_feed_forward(act, gated):
    torch.manual_seed(0)
    f = FeedForward(DIM, 20, gated=gated, act=act, bias=True, dtype=torch.float64)
    x = torch.randn(3, DIM, dtype=torch.float64)
    formulas = {
        "silu": lambda z: z / (1 + (-z).exp()),
        "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
        "gelu_tanh": lambda z: z * (1 + (math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)).tanh()) / 2,
        "relu": lambda z: z.clamp_min(0),
    }
    up = x @ f.up.weight.T + f.up.bias
    h = formulas[act](x @ f.gate.weight.T + f.gate.bias) * up if gated else formulas[act](up)
    torch.testing.assert_close(f(x), h @ f.down.weight.T + f.down.bias, rtol=1e-12, atol=1e-12)


def test_cross_attention_ignores_the_cache():
    a = Attention(DIM, HEADS)
    x, memory = torch.randn(2, 3, DIM), torch.randn(2, 5, DIM)
    cache = KeyValueCache()
    torch.testing.assert_close(a(x, memory, cache=cache), a(x, memory))
    assert cache.length == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, "heads=5 does not divide dim=12"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"heads": 4, "qk_norm": "head"}, "needs make_norm"),
        ({"heads": 4, "qk_norm": "all"}, "qk_norm must be"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        Attention(DIM, **arguments)
