"""audit end to end: a real model with real weights, repeated calls, inline norms, a model that fails."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import normkit
from normkit.audit import AuditError, audit
from normkit.audit.load import load


def test_a_real_pretrained_model_on_real_sentences() -> None:
    loaded = load("minilm")
    result = audit(loaded.model, *loaded.args, **loaded.kwargs)
    assert len(result.norms) == 13
    assert [n.placement for n in result.norms] == ["embedding"] + ["post"] * 12
    for norm in result.norms:
        assert norm.spec is not None
        assert norm.spec.kind == "layer"
        assert norm.spec.eps == pytest.approx(1e-12, rel=0.02)
        assert norm.spec.has_bias
    assert [b.placement for b in result.branches] == ["post"] * 12


class Inline(nn.Module):
    """RMSNorm of the queries and F.normalize of the output, written as operators; one LayerNorm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.gain = nn.Parameter(torch.rand(12) + 0.5)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4))
        x = self.norm(self.second(x))
        return nn.functional.normalize(x, dim=-1)


def test_repeated_calls_are_one_norm_and_inline_norms_are_found() -> None:
    result = audit(Inline(), torch.randn(3, 5, 12))
    found = [(n.name, n.kind, n.calls, n.functional) for n in result.norms]
    assert found == [("norm", "layer", 2, False), ("#0", "rms", 1, True), ("#1", "l2", 1, True)]
    inline = result["#0"].spec
    assert inline is not None
    assert inline.eps == pytest.approx(1e-4, rel=0.02)
    assert inline.has_weight
    normalized = result["#1"].spec
    assert normalized is not None
    assert (normalized.eps_at, normalized.eps) == ("floor", pytest.approx(1e-12, rel=0.02))


class Chain(nn.Module):
    """A weightless LayerNorm (a module, or fused and inline), and RMSNorm of its output written as operators."""

    def __init__(self, as_module: bool) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12, elementwise_affine=False) if as_module else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = nn.functional.layer_norm(x, (12,)) if self.norm is None else self.norm(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("as_module", [True, False])
def test_an_inline_norm_does_not_swallow_the_norm_before_it(as_module: bool) -> None:
    """Together they are again a LayerNorm by behaviour, so only where the slice begins tells them apart."""
    assert [n.kind for n in audit(Chain(as_module), torch.randn(3, 5, 12)).norms] == ["layer", "rms"]


@pytest.mark.parametrize("kind", ["whisper", "bart"])
def test_a_pair_is_audited_with_its_encoder(kind: str) -> None:
    loaded = load(kind)
    result = audit(loaded.model, *loaded.args, **loaded.kwargs)
    assert len({b.stream for b in result.branches}) == 2
    assert any(".encoder." in n.name for n in result.norms)


def test_two_towers_are_audited_together() -> None:
    loaded = load("clip")
    result = audit(loaded.model, *loaded.args, **loaded.kwargs)
    assert {n.name.split(".")[0] for n in result.norms if not n.functional} == {"text_model", "vision_model"}


def test_the_published_schema() -> None:
    result = audit(Inline(), torch.randn(3, 5, 12))
    written = json.loads(result.to_json())
    assert {"schema", "model", "norms", "branches", "findings"} <= set(written)
    spec_fields = set(normkit.NormSpec().to_dict())
    assert spec_fields | {"name", "class", "kind", "placement", "calls", "functional", "reason"} <= set(
        written["norms"][0]
    )


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :2])


def test_a_forward_that_raises_is_one_clear_error() -> None:
    with pytest.raises(AuditError, match=r"in inner.*float32\[2, 3\].*takes x"):
        audit(Raises(), torch.randn(2, 3))


def test_the_model_is_left_as_it_was() -> None:
    model = Inline()
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    audit(model, torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class TakesData(nn.Module):
    """A model with arguments that are called like options of audit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, data: Tensor, config: Tensor | None = None) -> Tensor:
        return self.norm(data if config is None else data + config)


def test_an_option_that_may_be_meant_for_the_model_is_refused() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(TypeError, match=r"^data= is an option of audit and an argument of TakesData.*position"):
        audit(TakesData(), data=x)
    with pytest.raises(TypeError, match=r"^config= is an option"):
        audit(TakesData(), x, config=x)
    assert audit(TakesData(), x, data=[x]).numbers is not None  # the model's is given by position


class HeadNorm(nn.Module):
    """A LayerNorm of each head that flattens the heads before its gain, as xLSTM's."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(heads * width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.layer_norm(x.float(), x.shape[-1:], eps=1e-4).to(x.dtype)
        return y.flatten(-2) * self.weight


def test_a_norm_that_flattens_what_it_normalized() -> None:
    found = normkit.identify(HeadNorm(4, 6), torch.randn(2, 5, 4, 6))
    assert found.spec is not None
    assert (found.kind, found.spec.weight_shape, found.spec.rounding) == ("layer", "per_head", "before_gain")
    result = audit(nn.Sequential(nn.Linear(6, 6), HeadNorm(4, 6)), torch.randn(2, 5, 4, 6))
    assert [(n.name, n.functional) for n in result.norms] == [("1", False)]
