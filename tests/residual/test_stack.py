"""Stacks of branches: which arguments reach whom, hooks, checkpoints, shared sublayers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normkit import Transformer, init_for
from normkit.residual import Attention, FeedForward, KeyValueCache, Residual, ResidualStack, Stream, mlp_roles
from normkit.residual.attention import allowed

from .blocks import Mlp, layer_norm, mlp, scramble

DIM = 12


def pair(layer=0, **options):
    """Attention and a feed-forward layer, each in its branch."""
    attention = Residual(Attention(DIM, 2, layer=layer, dtype=torch.float64), "pre", DIM, dtype=torch.float64)
    ffn = Residual(FeedForward(DIM, 20, dtype=torch.float64), "pre", DIM, dtype=torch.float64, **options)
    return attention, ffn


def states():
    torch.manual_seed(1)
    return torch.randn(2, 5, DIM, dtype=torch.float64)


def test_keywords_reach_the_sublayers_that_take_them():
    """A mask is for attention: a feed-forward layer in the same stack does not get it."""
    torch.manual_seed(0)
    attention, ffn = pair()
    x, mask = states(), torch.ones(5, 5, dtype=torch.bool).tril()
    got = ResidualStack((attention, ffn))(x, mask=mask)
    torch.testing.assert_close(got, ffn(attention(x, mask=mask)))
    assert not torch.allclose(got, ResidualStack((attention, ffn))(x))
    taking_all = Residual(lambda h, **kwargs: h * len(kwargs), "none")
    assert torch.equal(ResidualStack([taking_all])(x, mask=mask, causal=True), 3 * x)


def test_a_keyword_that_no_sublayer_takes_is_refused():
    with pytest.raises(TypeError, match="no sublayer of this stack takes masks; their keywords are cache, causal"):
        ResidualStack(pair())(states(), masks=None)


def test_a_cache_of_several_layers_needs_their_numbers():
    """Two layers that append to one entry would read each other's keys."""
    with pytest.raises(ValueError, match="give each Attention its layer="):
        Attention(DIM, 2)(states().float(), cache=KeyValueCache())
    torch.manual_seed(0)
    stack = ResidualStack([*pair(0), *pair(1)])
    x, cache = states(), KeyValueCache()
    parts = [stack(x[:, a:b], causal=True, cache=cache) for a, b in ((0, 2), (2, 3), (3, 5))]
    torch.testing.assert_close(torch.cat(parts, 1), stack(x, causal=True))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_causal_attention_behind_a_cache(softcap):
    """Several new positions at once: each stands at its own place behind the cached ones, not at the start."""
    torch.manual_seed(0)
    attention = Attention(DIM, 2, softcap=softcap, layer=0, dtype=torch.float64)
    x, cache = states(), KeyValueCache()
    parts = [attention(x[:, a:b], causal=True, cache=cache) for a, b in ((0, 2), (2, 5))]
    torch.testing.assert_close(torch.cat(parts, 1), attention(x, causal=True))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_causal_attention_with_a_mask_is_both(softcap):
    torch.manual_seed(0)
    attention = Attention(DIM, 2, softcap=softcap, dtype=torch.float64)
    x, valid = states(), torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    both = allowed(5, 5, causal=True, window=None, valid=valid, device=x.device)
    got = attention(x, mask=valid[:, None, None], causal=True)
    torch.testing.assert_close(got[:, 1:], attention(x, mask=both)[:, 1:])
    with pytest.raises(TypeError, match="True or 1 where a query may see a key"):
        attention(x, mask=torch.zeros(5, 5))


def test_branches_run_as_modules():
    """Forward hooks (profilers, sharded parameters, offloading) see every branch and layer of a stack."""
    model = Transformer(vocab=20, dim=16, depth=2, heads=2)
    layers = list(model.stack.layers)
    branches = [m for m in model.modules() if isinstance(m, Residual)]
    seen = []
    for module in (*layers, *branches):
        module.register_forward_hook(lambda module, args, output: seen.append(module))
    model(torch.zeros(1, 3, dtype=torch.long))
    assert {id(m) for m in seen} == {id(m) for m in (*layers, *branches)} and len(seen) == 6


def test_checkpoint_of_a_layer_with_a_pending_branch():
    """Gradients of a recomputed layer, dropout and stochastic depth included, are those of a plain one."""
    torch.manual_seed(0)
    model = Transformer(vocab=20, dim=16, depth=1, heads=2, dropout=0.2, drop_path=0.3).double()
    layer = model.stack.layers[0]
    stream = Stream(*(torch.randn(4, 5, 16, dtype=torch.float64, requires_grad=True) for _ in range(2)))
    found = []
    for run in (layer, lambda s: checkpoint(layer, s, use_reentrant=False)):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(run(stream).settle().square().sum(), [*stream[:2], *layer.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_sublayer_in_two_branches():
    """Tied layers: the inner norm is put in once, and an initialization by factors happens once."""
    torch.manual_seed(0)
    shared = Mlp(DIM, 20)
    branches = [Residual(shared, "sub", DIM, depth=4, roles=mlp_roles("fc1", "fc2"), dtype=torch.float64) for _ in "ab"]
    scramble(nn.ModuleList(branches))
    x = states()
    want = x
    for r in branches:
        want = want + mlp(layer_norm(want, r.input_norm), shared)
    torch.testing.assert_close(ResidualStack(branches)(x), want, rtol=1e-12, atol=1e-12)

    own = FeedForward(DIM, 20)
    inner = [Residual(own, "sub", DIM, depth=4).sublayer.inner_norm for _ in "ab"]
    assert inner[0] is inner[1]

    before = own.up.weight.clone()
    tied = nn.ModuleList(Residual(own, "deepnorm", DIM, depth=4) for _ in range(4))
    gains = init_for("deepnorm", 4, tied, base="keep")
    torch.testing.assert_close(own.up.weight, before * 32**-0.25)
    assert gains["0.sublayer.up.weight"] == gains["3.sublayer.up.weight"] == 32**-0.25


def test_a_stack_holds_branches_only():
    with pytest.raises(TypeError, match=r"must hold normkit\.Residual; got Linear"):
        ResidualStack([nn.Linear(2, 2)])
