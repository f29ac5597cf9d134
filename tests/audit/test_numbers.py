"""Measured numbers against the same figures taken by hand, and on a real pretrained model."""

from __future__ import annotations

import inspect
import json
import math

import pytest
import torch
from torch import Tensor, nn

from normkit.audit import audit
from normkit.audit.load import load
from normkit.audit.numbers.accumulate import Values, largest_logit
from normkit.audit.numbers.measure import DataError

DIM, HEADS = 24, 3


def rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


class Attention(nn.Module):
    """Eager attention that keeps its products, with a mask, a position bias, a soft cap and perhaps QK-norm."""

    def __init__(self, qk_norm: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm = nn.RMSNorm(DIM // HEADS, eps=1e-6) if qk_norm else None
        self.bias = nn.Parameter(torch.randn(1, HEADS, 7, 7) * 30)
        self.products: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (p.view(b, t, HEADS, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        q = q if self.q_norm is None else self.q_norm(q)
        logits = q @ k.transpose(-1, -2) * (DIM // HEADS) ** -0.5
        if not self.training:
            self.products.append(logits.detach().abs().max())
        logits = torch.tanh(logits / 5.0) * 5.0 + self.bias
        logits = logits.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(b, t, DIM))


class Block(nn.Module):
    def __init__(self, qk_norm: bool, in_place: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(DIM), nn.RMSNorm(DIM, eps=1e-6)
        self.attention = Attention(qk_norm)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.in_place = in_place
        self.seen: dict[str, list[float]] = {"stream": [], "branch": []}

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        self.seen["stream"].append(rms(x))
        self.seen["branch"].append(rms(branch))
        if self.in_place:
            x += branch
            return x
        return x + branch

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x, self.attention(self.attention_norm(x)))
        return self.add(x, self.mlp(self.mlp_norm(x)))


class Net(nn.Module):
    def __init__(self, qk_norm: bool = False, in_place: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(5, DIM)
        self.blocks = nn.ModuleList(Block(qk_norm, in_place) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def net(**kwargs: bool) -> Net:
    torch.manual_seed(3)
    model = Net(**kwargs).eval()
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)):
            norm.weight.copy_(torch.rand(norm.weight.shape) + 0.5)
    return model


def data(seed: int = 0) -> Tensor:
    return torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("in_place", [False, True])
def test_stream_and_branches_are_what_is_added(in_place: bool) -> None:
    model, x = net(in_place=in_place), data()
    with torch.no_grad():
        model(x)
    wanted = [(s, b) for block in model.blocks for s, b in zip(block.seen["stream"], block.seen["branch"], strict=True)]
    result = audit(model, x, data=[x], gradients=False)
    assert result.numbers is not None
    found = result.numbers.branches
    assert [b.depth for b in found] == [0, 1, 2, 3]
    for branch, (stream, added) in zip(found, wanted, strict=True):
        assert branch.stream_rms == pytest.approx(stream, rel=1e-6)
        assert branch.branch_rms == pytest.approx(added, rel=1e-6)
        assert branch.share == pytest.approx(added / (added + stream), rel=1e-6)


def test_norms_see_what_hooks_see_over_all_batches() -> None:
    model = net()
    batches = [data(1), data(2) * 3]
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    hooks = [
        m.register_forward_hook(lambda _, given, out, name=name: seen.setdefault(name, []).append((given[0], out)))
        for name, m in model.named_modules()
        if isinstance(m, nn.LayerNorm | nn.RMSNorm)
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for hook in hooks:
        hook.remove()
    numbers = audit(model, batches[0], data=batches).numbers
    assert numbers is not None and numbers.batches == 2 and not numbers.notes
    for name, pairs in seen.items():
        found = numbers.norm(name)
        assert found is not None
        given = torch.cat([g.reshape(-1, DIM) for g, _ in pairs]).double()
        made = torch.cat([o.reshape(-1, DIM) for _, o in pairs])
        assert found.input_rms == pytest.approx(rms(given), rel=1e-6)
        assert found.input_max == pytest.approx(given.abs().max().item(), rel=1e-6)
        assert found.output_rms == pytest.approx(rms(made), rel=1e-6)
        torch.testing.assert_close(found.channel_mean, given.mean(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.channel_var, given.var(0, unbiased=False), rtol=1e-5, atol=1e-7)
        per_channel = given.square().mean(0).sqrt()
        assert found.outlier_ratio == pytest.approx((per_channel.max() / per_channel.median()).item(), rel=1e-5)


def test_gradients_at_norm_inputs() -> None:
    """Against autograd of the same projection; the parameters' own gradients are not touched."""
    model, x = net(), data()
    inputs: list[Tensor] = []
    norm = model.blocks[1].mlp_norm
    handle = norm.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    out = model(x)
    handle.remove()
    v = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (wanted,) = torch.autograd.grad((out * v).sum() / math.sqrt(out.numel()), inputs)
    numbers = audit(model, x, data=[x]).numbers
    assert numbers is not None and numbers.gradient_of == "random projection"
    found = numbers.norm("blocks.1.mlp_norm")
    assert found is not None and found.gradient_rms == pytest.approx(rms(wanted), rel=1e-5)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_logits_before_soft_cap_bias_and_mask(qk_norm: bool) -> None:
    model, x = net(qk_norm=qk_norm), data()
    with torch.no_grad():
        model(x)
    wanted = [block.attention.products[0].item() for block in model.blocks]
    numbers = audit(model, x, data=[x], gradients=False).numbers
    assert numbers is not None
    assert [a.name for a in numbers.attentions] == ["blocks.0.attention", "blocks.1.attention"]
    assert [a.logit_max for a in numbers.attentions] == pytest.approx(wanted, rel=1e-5)
    assert all(a.qk_norm is qk_norm for a in numbers.attentions)


@pytest.mark.parametrize("causal", [False, True])
def test_logits_of_fused_attention(causal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 4, 5, 8, generator=generator), torch.randn(2, 2, 5, 8, generator=generator)
    mask = torch.rand(2, 1, 5, 5, generator=generator) > 0.3
    keep = (mask & torch.ones(5, 5, dtype=torch.bool).tril()) if causal else mask
    products = (query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5).abs()
    wanted = products.masked_fill(~keep, 0).max().item()
    assert largest_logit(query, key, scale=None, causal=causal, mask=mask) == pytest.approx(wanted, rel=1e-5)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert largest_logit(query, key, scale=None, causal=causal, mask=added) == pytest.approx(wanted, rel=1e-5)


def test_dead_and_outlier_gains_and_channels() -> None:
    model, x = net(), data()
    with torch.no_grad():
        model.norm.weight[3], model.norm.weight[5] = 0.0, -40.0
        model.embed.weight[7] *= 500
    numbers = audit(model, x, data=[x], gradients=False).numbers
    assert numbers is not None
    final, first = numbers.norm("norm"), numbers.norm("blocks.0.attention_norm")
    assert final is not None and final.gain is not None and first is not None
    assert (final.gain.dead, final.gain.outliers, final.gain.max) == ((3,), (5,), 40.0)
    assert first.outlier_channels == (7,)


def test_gains_are_effective_ones() -> None:
    """A gain stored around zero (1 + w) is not dead."""
    import normkit

    norm = normkit.nn.RMSNorm(DIM, eps=1e-6, weight_offset=1.0)
    model = nn.Sequential(nn.Linear(DIM, DIM), norm)
    numbers = audit(model, torch.randn(3, DIM), data=[torch.randn(3, DIM)]).numbers
    assert numbers is not None and numbers.norms[0].gain is not None
    assert (numbers.norms[0].gain.median, numbers.norms[0].gain.dead) == (1.0, ())


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    values = Values(-1)
    values.add(torch.tensor([[1.0, float("nan")], [float("inf"), 3.0]]))
    assert (values.nonfinite, values.max) == (2, 3.0)
    model, x = net(), data()
    x[0, 0, 0] = float("nan")
    result = audit(model, data(), data=[x])
    assert result.numbers is not None and result.numbers.norms[0].nonfinite > 0
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_model_is_left_as_it_was_and_batches_may_be_of_any_form() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    x = torch.randn(2, 3, 8, 8)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    numbers = audit(model, x, data=[x, (x,), {"input": x}]).numbers
    assert numbers is not None and numbers.batches == 3
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert numbers.norms[0].channel_mean is not None and numbers.norms[0].channel_mean.shape == (4,)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_data_that_does_not_fit_is_one_clear_error() -> None:
    with pytest.raises(DataError, match="batch 1: the model raised RuntimeError"):
        audit(net(), data(), data=[data(), torch.randn(2, 7, 4)])
    with pytest.raises(DataError, match="meta"):
        audit(net().to("meta"), data().to("meta"), data=[data()])


def test_a_real_pretrained_model() -> None:
    loaded = load("minilm")
    result = audit(loaded.model, **loaded.kwargs, data=[loaded.kwargs])
    numbers = result.numbers
    assert numbers is not None and numbers.gradient_of == "random projection"
    assert len(numbers.norms) == 13 and len(numbers.branches) == 12 and len(numbers.attentions) == 6
    assert all(n.gradient_rms for n in numbers.norms)
    by_hand = loaded.model(**loaded.kwargs, output_hidden_states=True).hidden_states
    for layer, branch in enumerate(numbers.branches[::2]):  # the stream that each layer reads
        assert branch.stream_rms == pytest.approx(rms(by_hand[layer]), rel=1e-5)
    assert "bert" in (result.norms[0].location or ("", 0))[0]


def test_an_inline_norm_is_located_at_its_operators() -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            x = self.map(x)
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    (norm,) = audit(Inline(), torch.randn(3, DIM)).norms
    lines, start = inspect.getsourcelines(Inline.forward)
    assert norm.location == (__file__, start + len(lines) - 1)
