"""Norms that are no modules of their own, and what looks like a norm and is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normkit.audit import NormRecord, audit
from normkit.audit.find import find_norms
from normkit.audit.trace import trace

D = 16
Written = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """A residual branch with something written between two maps."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)
        self.weight, self.bias = nn.Parameter(torch.rand(D) + 0.5), nn.Parameter(torch.randn(D) * 0.1)
        self.register_buffer("mean", torch.randn(D) * 0.1)
        self.register_buffer("var", torch.rand(D) + 0.5)
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.written(self, self.up(x))))


def found(written: Written, device: str = "cpu") -> list[NormRecord]:
    torch.manual_seed(0)
    return list(audit(Block(written).eval().to(device), torch.randn(4, 8, D, device=device)).norms)


def channels_first(function: Written) -> Written:
    return lambda m, x: function(m, x.transpose(1, 2)).transpose(1, 2)


def rms(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("written", "kind", "eps", "offset", "weight", "bias"),
    [
        (lambda m, x: F.layer_norm(x, (D,), m.weight, m.bias, 1e-3), "layer", 1e-3, 0, True, True),
        (lambda m, x: F.layer_norm(x, (D,), eps=1e-3), "layer", 1e-3, 0, False, False),
        (lambda m, x: F.layer_norm(x, (D,), eps=1e-3) * m.weight + m.bias, "layer", 1e-3, 0, True, True),
        (lambda m, x: F.rms_norm(x, (D,), m.weight, 1e-3), "rms", 1e-3, 0, True, False),
        (lambda m, x: m.weight * rms(x), "rms", 1e-5, 0, True, False),
        (lambda m, x: rms(x) * (1 + m.weight), "rms", 1e-5, 1, True, False),
        (lambda m, x: standardized(x) * m.weight + m.bias, "layer", 1e-3, 0, True, True),
        (lambda m, x: F.normalize(x, dim=-1) * m.weight, "l2", 1e-12, 0, True, False),
        (lambda m, x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6), "l2", 1e-6, 0, False, False),
        (channels_first(lambda m, x: F.group_norm(x, 4, m.weight, m.bias, 1e-3)), "group", 1e-3, 0, True, True),
        (
            channels_first(lambda m, x: F.batch_norm(x, m.mean, m.var, m.weight, m.bias, eps=1e-3)),
            "batch", 1e-3, 0, True, True,
        ),
        (
            channels_first(lambda m, x: F.instance_norm(x, weight=m.weight, bias=m.bias, eps=1e-3)),
            "instance", 1e-3, 0, True, True,
        ),
    ],
)  # fmt: skip
def test_a_norm_written_inline_with_the_blocks_own_parameters(
    written: Written, kind: str, eps: float, offset: float, weight: bool, bias: bool, device: str
) -> None:
    (norm,) = found(written, device)
    assert norm.functional
    assert norm.kind == kind
    assert norm.spec is not None
    assert norm.spec.eps == pytest.approx(eps, rel=0.02)
    assert (norm.spec.weight_offset, norm.spec.has_weight, norm.spec.has_bias) == (offset, weight, bias)
    assert norm.parameters.get("weight") == ("weight" if weight else None)


@pytest.mark.parametrize(
    "written",
    [
        lambda m, x: x.exp() / x.exp().sum(-1, keepdim=True),
        lambda m, x: x - x.mean(-1, keepdim=True),
        lambda m, x: x * torch.sigmoid(x) / torch.sigmoid(x).sum(-1, keepdim=True),
        lambda m, x: x / x.sum(-1, keepdim=True),
    ],
)
def test_what_divides_by_a_sum_is_no_norm(written: Written) -> None:
    assert found(written) == []


def test_a_product_that_follows_one_of_two_readers_is_no_gain() -> None:
    def written(m: Block, x: Tensor) -> Tensor:
        y = rms(x)
        return y * m.weight + (y * m.bias).sin()

    (norm,) = found(written)
    assert norm.spec is not None
    assert not norm.spec.has_weight


def test_a_batch_norm_inline_leaves_its_buffers_alone() -> None:
    block = Block(channels_first(lambda m, x: F.batch_norm(x, m.mean, m.var, training=True)))
    before = [b.clone() for b in block.buffers()]
    (norm,) = audit(block, torch.randn(4, 8, D)).norms
    assert norm.batch_statistics
    assert all(torch.equal(a, b) for a, b in zip(before, block.buffers(), strict=True))


class Fused(nn.BatchNorm2d):
    """A norm with the activation inside."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(input))


class FusedGroups(nn.GroupNorm):
    """The same with groups."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("norm", "kind"), [(Fused(8, eps=1e-3), "batch"), (FusedGroups(4, 8, 1e-3), "group")])
def test_a_norm_fused_with_an_activation_is_that_norm(norm: nn.Module, kind: str, device: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 8, 3)).eval().to(device)
    (record,) = audit(model, torch.randn(2, 3, 9, 9, device=device)).norms
    assert (record.name, record.kind, record.functional, record.placement) == ("1", kind, False, "conv")
    assert record.spec is not None
    assert record.spec.eps == pytest.approx(1e-3, rel=0.02)
    assert record.spec.has_bias
    assert record.parameters["weight"] == "weight"


class PerHead(nn.Module):
    """A LayerNorm for each head, with a gain and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4, 8)), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,)) * self.weight + self.bias


def test_a_bias_for_each_head() -> None:
    (norm,) = audit(nn.Sequential(PerHead(), nn.Flatten(2), nn.Linear(32, 3)), torch.randn(2, 5, 4, 8)).norms
    assert norm.kind == "layer"
    assert norm.spec is not None
    assert norm.spec.weight_shape == "per_head"
    assert norm.spec.has_bias


def test_weight_norm_is_not_probed_with_other_shapes() -> None:
    """Its operator writes out of bounds where the two tensors do not fit each other."""
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Conv1d(n, 16, 5), dim=0) for n in (8, 16)))
    norms = audit(model, torch.randn(2, 8, 40)).norms
    assert [n.reason for n in norms] == ["weight normalization: it normalizes a weight, not activations"] * 2


def test_a_standardized_weight_is_no_norm_of_activations() -> None:
    def written(m: Block, x: Tensor) -> Tensor:
        return F.linear(x, standardized(m.down.weight))

    (norm,) = found(written)
    assert norm.kind == "other"
    assert "weight" in norm.reason


@pytest.mark.filterwarnings("ignore")
def test_under_inference_mode_the_norms_are_seen() -> None:
    with torch.inference_mode():
        (norm,) = audit(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)), torch.randn(2, D)).norms
    assert norm.kind == "layer"


def test_a_lazy_model_is_refused_before_it_is_changed() -> None:
    from normkit.audit import AuditError

    model = nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4))
    with pytest.raises(AuditError, match="not initialized yet"):
        audit(model, torch.randn(2, 3))
    assert isinstance(model[0], nn.LazyLinear)


def llama(m: Block, x: Tensor) -> Tensor:
    y = x.to(torch.float32)
    return m.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def gemma(m: Block, x: Tensor) -> Tensor:
    return (rms(x.float()) * (1.0 + m.weight.float())).type_as(x)


def t5(m: Block, x: Tensor) -> Tensor:
    y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-5)
    return m.weight * y.to(m.weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("written", "rounding", "offset"),
    [
        (llama, "before_gain", 0.0),
        (t5, "before_gain", 0.0),
        (gemma, "after_gain", 1.0),
        (lambda m, x: (m.weight * rms(x.float())).to(x.dtype), "after_gain", 0.0),
        (lambda m, x: m.weight * rms(x), "none", 0.0),
    ],
)
def test_where_an_inline_norm_rounds(
    written: Written, rounding: str, offset: float, device: str, dtype: torch.dtype
) -> None:
    """A float32 run records no cast to float32, so this needs a look at the module in half precision."""
    torch.manual_seed(0)
    block = Block(written).eval().to(device, dtype)
    (norm,) = audit(block, torch.randn(4, 8, D, device=device, dtype=dtype)).norms
    assert norm.spec is not None
    assert (norm.kind, norm.spec.rounding, norm.spec.weight_offset) == ("rms", rounding, offset)


class OwnInferenceMode(nn.Module):
    """A frozen part that its model runs in inference mode, where autograd takes no operator apart."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            features = self.frozen(x)
        return self.norm(features.clone())


def test_norms_that_a_model_runs_in_inference_mode() -> None:
    assert [n.name for n in audit(OwnInferenceMode(), torch.randn(2, 5, 8)).norms] == ["frozen.1", "norm"]


def test_a_norm_of_a_norm_does_not_take_the_first_one_in() -> None:
    def written(block: Block, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x / x.norm(dim=-1, keepdim=True)
        return x

    recorded = trace(Block(written), (torch.randn(3, D),))
    first, second = (norm.calls[0] for norm in find_norms(recorded))
    assert second.inputs == (first.output,)
    assert not first.nodes & second.nodes


class GainOutside(nn.Module):
    """A gain of its own, with an offset, around a norm that has none."""

    def __init__(self, inner: nn.Module, offset: float) -> None:
        super().__init__()
        self.inner, self.gamma, self.offset = inner, nn.Parameter(torch.randn(D) * 0.1 + 1 - offset), offset

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (self.gamma + self.offset)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_module_that_multiplies_by_the_gain_is_the_norm(offset: float, device: str) -> None:
    torch.manual_seed(0)
    plain = nn.LayerNorm(D, elementwise_affine=False)
    model = nn.Sequential(GainOutside(plain, offset), nn.Linear(D, D), GainOutside(plain, offset), nn.Linear(D, D))
    norms = audit(model.to(device), torch.randn(4, 8, D, device=device)).norms
    assert [(n.name, n.kind, n.calls) for n in norms] == [("0", "layer", 1), ("2", "layer", 1)]
    for norm in norms:
        assert norm.spec is not None
        assert (norm.spec.has_weight, norm.spec.weight_offset) == (True, offset)


def test_a_wrapper_that_adds_no_gain_is_not_the_norm() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.LayerNorm(D, elementwise_affine=False)), nn.Linear(D, D))
    assert [n.name for n in audit(model, torch.randn(4, 8, D)).norms] == ["1.0"]


class Cumulative(nn.Module):
    """A causal norm: each step by the mean and the variance of all features up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None] * D
        mean = x.sum(-1, keepdim=True).cumsum(1) / count
        variance = (x - mean).square().sum(-1, keepdim=True).cumsum(1) / count
        return (x - mean) * torch.rsqrt(variance + 1e-3) * self.weight


def test_a_norm_by_statistics_that_run_along_the_tokens_is_reported() -> None:
    """A cumulative sum mixes tokens, but of their statistics alone: with it the norm went unseen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Cumulative(), nn.ReLU(), nn.Linear(D, D))
    assert [(n.name, n.kind) for n in audit(model, torch.randn(2, 7, D)).norms] == [("1", "other")]
    sums = nn.Sequential(nn.Linear(D, D), Running(), nn.Linear(D, D))
    assert not audit(sums, torch.randn(2, 7, D)).norms


class Running(nn.Module):
    """A running mean of the tokens: nothing is divided by a statistic."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None] + x.mean(-1, keepdim=True).cumsum(1)


class Scaler(nn.Module):
    """Standardizes what it is given, and hands on by what."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loc, scale = x.mean(1, keepdim=True), (x.var(1, keepdim=True) + 1e-5).sqrt()
        return (x - loc) / scale, loc, scale


class Scaled(nn.Module):
    """A forecast of values by the location and the scale of the first few of them, or by their own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.scaler, self.up, self.own = Scaler(), nn.Linear(D, 1), own

    def forward(self, x: Tensor) -> Tensor:
        scaled, loc, scale = self.scaler(x[:, : D // 2] if not self.own else x)
        return self.up(scaled if self.own else (x - loc) / scale) * scale + loc


def test_a_scaler_whose_scaled_values_nobody_reads_is_no_norm() -> None:
    """Informer takes the location and the scale alone, and applies them to more than they were formed of."""
    assert len(audit(Scaled(own=True), torch.randn(3, D)).norms) == 1
    assert not audit(Scaled(own=False), torch.randn(3, D)).norms


class Chosen(nn.Module):
    """Descriptors of some points, the number of which depends on the data, at unit length over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(D, D, 1), nn.Conv1d(D, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = x[:, :, x.mean((0, 1)).abs().argsort()[:5]]
        return self.down(F.normalize(x, p=2, dim=1))


def test_a_length_over_dim_1_is_one_of_features_where_no_other_rank_tells() -> None:
    """Of three dims, the channels of each point are also the space of each point as a channel."""
    torch.manual_seed(0)
    (norm,) = audit(Chosen(), torch.randn(2, D, 9)).norms
    assert norm.spec is not None and (norm.kind, norm.spec.axes, norm.spec.channel_dim) == ("l2", "features", 1)
