"""Norms whose sums are written as products, norms by magnitudes, and divisions by a sum or a maximum that are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit import audit
from tests.audit.test_find import Block, D, Written, found


def dot(x: Tensor) -> Tensor:
    """The sum of squares as a product of a row and a column."""
    return (x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1)


def contracted(x: Tensor) -> Tensor:
    return torch.einsum("...d,...d->...", x, x).unsqueeze(-1)


def centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("written", "kind", "statistic", "eps_at", "weight"),
    [
        (lambda m, x: m.weight * x * torch.rsqrt(contracted(x) / D + 1e-5), "rms", "mean_square", "variance", True),
        (
            lambda m, x: x * torch.rsqrt(torch.einsum("btd,btd->bt", x, x)[..., None] / D + 1e-5),
            "rms", "mean_square", "variance", False,
        ),
        (lambda m, x: x / torch.sqrt(contracted(x) + 1e-5), "l2", "sum", "variance", False),
        (lambda m, x: x * torch.rsqrt(dot(x) / D + 1e-5) * m.weight, "rms", "mean_square", "variance", True),
        (
            lambda m, x: x * torch.rsqrt((x * x) @ torch.ones(D, 1, device=x.device) / D + 1e-5),
            "rms", "mean_square", "variance", False,
        ),
        (lambda m, x: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-5), "l2", "sum", "std", False),
        (lambda m, x: x / (torch.norm(x, dim=-1).unsqueeze(-1) + 1e-5) * m.weight, "l2", "sum", "std", True),
        (lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-5), "l2", "sum", "floor", False),
        (
            lambda m, x: x / (x.norm(2, dim=-1, keepdim=True) * D**-0.5 + 1e-5) * m.weight,
            "rms", "mean_square", "std", True,
        ),
        (
            lambda m, x: centered(x) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * m.weight,
            "layer", "mean_square", "variance", True,
        ),
        (lambda m, x: centered(x) / (x.std(-1, keepdim=True) + 1e-5), "layer", "unbiased", "std", False),
        (
            lambda m, x: (lambda v, mean: (x - mean) / torch.sqrt(v + 1e-5))(*torch.var_mean(x, -1, keepdim=True)),
            "layer", "unbiased", "variance", False,
        ),
        (
            lambda m, x: (lambda s, mean: (x - mean) / (s + 1e-5) * m.weight)(*torch.std_mean(x, -1, keepdim=True)),
            "layer", "unbiased", "std", True,
        ),
    ],
)  # fmt: skip
def test_every_way_to_write_the_statistic(
    written: Written, kind: str, statistic: str, eps_at: str, weight: bool, device: str
) -> None:
    (norm,) = found(written, device)
    assert norm.spec is not None
    assert (norm.kind, norm.spec.statistic, norm.spec.eps_at) == (kind, statistic, eps_at)
    assert norm.spec.eps == pytest.approx(1e-5, rel=0.02)
    assert norm.spec.has_weight == weight


class Einsum(nn.Module):
    """RMSNorm with an einsum for its sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(torch.einsum("...d,...d->...", x, x).unsqueeze(-1) / D + 1e-5)


def test_a_module_whose_sum_is_an_einsum_is_one_norm() -> None:
    (norm,) = audit(nn.Sequential(nn.Linear(D, D), Einsum(), nn.Linear(D, D)), torch.randn(2, 5, D)).norms
    assert (norm.name, norm.functional, norm.kind) == ("1", False, "rms")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("written", "statistic"),
    [
        (lambda m, x: x / x.abs().sum(-1, keepdim=True), "l1 length"),
        (lambda m, x: x / (x.abs().sum(-1, keepdim=True) + 1e-6) * m.weight, "l1 length"),
        (lambda m, x: x / x.norm(1, dim=-1, keepdim=True), "l1 length"),
        (lambda m, x: F.normalize(x, p=1, dim=-1) * m.weight, "l1 length"),
        (lambda m, x: x / (x.abs().mean(-1, keepdim=True) + 1e-6), "mean magnitude"),
        (lambda m, x: x / x.abs().amax(-1, keepdim=True), "largest magnitude"),
        (lambda m, x: x / (x.abs().max(-1, keepdim=True).values + 1e-6) * m.weight, "largest magnitude"),
        (lambda m, x: F.normalize(x, p=float("inf"), dim=-1), "largest magnitude"),
    ],
)
def test_a_norm_by_magnitudes_is_named(written: Written, statistic: str, device: str) -> None:
    (norm,) = found(written, device)
    assert (norm.kind, norm.spec, norm.functional) == ("other", None, True)
    assert statistic in norm.reason


class Largest(nn.Module):
    """Max-abs normalization as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)


def test_a_module_that_divides_by_the_largest_is_other() -> None:
    (norm,) = audit(nn.Sequential(nn.Linear(D, D), Largest(), nn.Linear(D, D)), torch.randn(2, 5, D)).norms
    assert (norm.name, norm.kind, norm.functional) == ("1", "other", False)
    assert "largest magnitude" in norm.reason


class Heads(nn.Module):
    """Attention whose queries and keys are normalized by some function."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.before(self.q(x)), self.before(self.k(x))
        return x + self.o(self.after(q @ k.transpose(1, 2) / 4) @ self.v(x))


def l1(x: Tensor) -> Tensor:
    return x / x.abs().sum(-1, keepdim=True).clamp_min(1.0)


def test_queries_and_keys_by_their_l1_length() -> None:
    norms = audit(Heads(l1, lambda s: s.softmax(-1)), torch.randn(2, 5, D)).norms
    assert [(n.kind, n.placement) for n in norms] == [("other", "qk")] * 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "scores",
    [
        lambda s: s.softmax(-1),
        lambda s: s / s.abs().sum(-1, keepdim=True).clamp_min(1.0),
        lambda s: s.tril() / s.tril().detach().abs().sum(-1, keepdim=True).clamp(min=1.0),
        lambda s: s.relu() / (s.relu().sum(-1, keepdim=True) + 1e-6),
        lambda s: F.normalize(s.sigmoid(), p=1, dim=-1),
        lambda s: s / s.shape[-1],
    ],
)
def test_attention_weights_are_no_norm(scores: Callable[[Tensor], Tensor], device: str) -> None:
    model = Heads(lambda x: x, scores).to(device)
    assert audit(model, torch.randn(2, 5, D, device=device)).norms == ()


def scaled(x: Tensor, levels: int = 127) -> Tensor:
    return x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / levels


def straight_through(x: Tensor) -> Tensor:
    return x + ((x / scaled(x)).round().clamp(-128, 127) * scaled(x) - x).detach()


def grouped(m: Block, x: Tensor) -> Tensor:
    y = x.reshape(4, 8, 2, D // 2)
    return ((y / scaled(y)).round() * scaled(y)).reshape(x.shape)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "written",
    [
        lambda m, x: (x / scaled(x)).round().clamp(-128, 127) * scaled(x),
        lambda m, x: (x / scaled(x, 1) * 127).round() / 127 * scaled(x, 1),
        lambda m, x: F.linear((x / scaled(x)).to(torch.int8).float(), m.up.weight) * scaled(x),
        lambda m, x: (x / scaled(x, 1)).to(torch.float8_e4m3fn).float() * scaled(x, 1),
        lambda m, x: F.linear(straight_through(x), m.up.weight),
        lambda m, x: F.linear(x, (m.up.weight / m.up.weight.abs().mean()).round().clamp(-1, 1)),
        grouped,
    ],
)
def test_quantization_scales_are_no_norm(written: Written, device: str) -> None:
    assert found(written, device) == []


class Quantizer(nn.Module):
    """Absmax quantization of activations to eight bits."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        return (x * scale).round().clamp(-128, 127) / scale


def test_a_quantizer_module_is_no_norm() -> None:
    assert audit(nn.Sequential(nn.Linear(D, D), Quantizer(), nn.Linear(D, D)), torch.randn(2, 5, D)).norms == ()


def routed(m: Block, x: Tensor) -> Tensor:
    weights, chosen = m.up(x).softmax(-1).topk(2, -1)
    weights = weights / torch.norm(weights, p=1, dim=-1, keepdim=True)
    return (x.gather(-1, chosen) * weights).sum(-1, keepdim=True) * x


def chosen_by_sigmoid(m: Block, x: Tensor) -> Tensor:
    scores = m.up(x).sigmoid()
    weights = scores.gather(-1, (scores + m.bias).topk(2, -1).indices)
    return (weights / (weights.abs().sum(-1, keepdim=True) + 1e-20)).sum(-1, keepdim=True) * x


def with_losses(m: Block, x: Tensor) -> Tensor:
    labels = torch.zeros(4 * 8, dtype=torch.int64, device=x.device)
    cross = F.cross_entropy(x.reshape(-1, D), labels)
    relative = (x - x.flip(1)).abs().sum() / x.abs().sum()
    p = x.sigmoid()
    dice = 1 - 2 * (p * p.flip(1)).sum(-1, keepdim=True) / (p.sum(-1, keepdim=True) + p.flip(1).sum(-1, keepdim=True))
    balance = (x.softmax(-1).mean((0, 1)) * (x > 0).float().mean((0, 1))).sum() * D
    return x * (cross + relative + dice + balance + F.l1_loss(x, x.flip(1)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "written",
    [
        routed,
        chosen_by_sigmoid,
        with_losses,
        lambda m, x: (lambda e: e / e.sum(-1, keepdim=True))((x - x.amax(-1, keepdim=True)).exp()),
        lambda m, x: x.square() / x.square().sum(-1, keepdim=True),
        lambda m, x: F.avg_pool1d(x, 3, 1, 1) - x,
        lambda m, x: (x * (x > 0)).sum(1, keepdim=True) / (x > 0).sum(1, keepdim=True).clamp_min(1) + x,
    ],
)
def test_shares_pools_and_losses_are_no_norms(written: Written, device: str) -> None:
    assert found(written, device) == []
