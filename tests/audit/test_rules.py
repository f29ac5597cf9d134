"""Each rule has a model that fires it and one, as near as can be, that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.audit import Audit, audit
from normkit.audit.rules import RULES


class PlainRMS(nn.Module):
    """RMSNorm in the input's dtype, or (upcast) with a float32 statistic."""

    def __init__(self, dim: int, eps: float, upcast: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim) + 0.1 * torch.arange(dim) / dim)
        self.eps, self.upcast = eps, upcast

    def forward(self, x: Tensor) -> Tensor:
        z = x.float() if self.upcast else x
        return self.weight * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Block(nn.Module):
    """A residual branch around a two-layer map; the norm sits before the branch or on the sum."""

    def __init__(self, dim: int, post: bool, norm_name: str) -> None:
        super().__init__()
        self.post, self.norm_name = post, norm_name
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.add_module(norm_name, nn.LayerNorm(dim))

    def forward(self, x: Tensor) -> Tensor:
        norm = getattr(self, self.norm_name)
        branch = self.down(torch.relu(self.up(x if self.post else norm(x))))
        return norm(x + branch) if self.post else x + branch


def stack(*, post: bool, final: bool, norm_name: str = "norm") -> Callable[[], tuple[nn.Module, Tensor]]:
    def make() -> tuple[nn.Module, Tensor]:
        blocks = [Block(12, post, norm_name) for _ in range(3)]
        tail = [nn.LayerNorm(12)] if final else []
        return nn.Sequential(nn.Linear(5, 12), *blocks, *tail, nn.Linear(12, 4)), torch.randn(2, 7, 5)

    return make


def half(eps: float, upcast: bool, dtype: torch.dtype = torch.float16) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (
        nn.Sequential(nn.Linear(16, 16), PlainRMS(16, eps, upcast)).to(dtype), torch.randn(2, 5, 16).to(dtype)
    )  # fmt: skip


def batch(*, model_training: bool, norm_training: bool, updated: bool) -> Callable[[], tuple[nn.Module, Tensor]]:
    def make() -> tuple[nn.Module, Tensor]:
        norm = nn.BatchNorm2d(4)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
        if updated:
            model(torch.randn(2, 3, 8, 8))
        model.train(model_training)
        norm.train(norm_training)
        return model, torch.randn(2, 3, 8, 8)

    return make


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "statistic-overflow": (half(1e-3, upcast=False), half(1e-3, upcast=True)),
    "eps-vanishes": (half(1e-9, upcast=False), half(1e-9, upcast=True)),
    "batch-statistics-at-inference": (
        batch(model_training=False, norm_training=True, updated=True),
        batch(model_training=False, norm_training=False, updated=True),
    ),
    "training-mode": (
        batch(model_training=True, norm_training=True, updated=True),
        batch(model_training=False, norm_training=False, updated=True),
    ),
    "running-statistics-untouched": (
        batch(model_training=False, norm_training=False, updated=False),
        batch(model_training=False, norm_training=False, updated=True),
    ),
    "missing-final-norm": (stack(post=False, final=False), stack(post=False, final=True)),
    "double-final-norm": (stack(post=True, final=True), stack(post=True, final=False)),
    "misleading-name": (
        stack(post=False, final=True, norm_name="post_mlp_norm"),
        stack(post=True, final=False, norm_name="post_mlp_norm"),
    ),
}


def run(make: Callable[[], tuple[nn.Module, Tensor]]) -> Audit:
    torch.manual_seed(0)
    model, x = make()
    return audit(model, x)


def test_every_rule_has_its_two_models() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_fires(rule: str) -> None:
    findings = [f for f in run(CASES[rule][0]).findings if f.rule == rule]
    assert len(findings) == 1
    (finding,) = findings
    assert finding.severity == RULES[rule].severity
    assert finding.where
    assert finding.message
    assert finding.fix


@pytest.mark.parametrize("rule", RULES)
def test_keeps_quiet(rule: str) -> None:
    assert rule not in [f.rule for f in run(CASES[rule][1]).findings]


def test_norms_with_one_fault_are_one_finding() -> None:
    model = nn.Sequential(PlainRMS(16, 1e-9, upcast=False), PlainRMS(16, 1e-9, upcast=False)).half()
    found = [f.where for f in audit(model, torch.randn(2, 5, 16).half()).findings if f.rule == "eps-vanishes"]
    assert found == [("0", "1")]


def test_bfloat16_has_float32s_range_so_nothing_overflows() -> None:
    rules = {f.rule for f in run(half(1e-9, upcast=False, dtype=torch.bfloat16)).findings}
    assert rules.isdisjoint({"statistic-overflow", "eps-vanishes"})


def test_the_reported_overflow_is_real() -> None:
    """The model that fires does return 0 for 300, and the one that does not returns about 1."""
    x = torch.full((1, 16), 300.0, dtype=torch.float16)
    bad, good = PlainRMS(16, 1e-3, upcast=False).half(), PlainRMS(16, 1e-3, upcast=True).half()
    assert bad(x).abs().max() == 0
    assert good(x).min() > 0.9


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_own_transformers(norm_first: bool) -> None:
    """nn.TransformerEncoder with norm_first ends without a norm; nn.Transformer in post-norm ends in two."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    rules = {f.rule for f in audit(encoder, torch.randn(2, 5, 16)).findings}
    assert ("missing-final-norm" in rules) == norm_first
    whole = nn.Transformer(16, 2, 2, 2, 32, batch_first=True, norm_first=norm_first).eval()
    rules = {f.rule for f in audit(whole, torch.randn(2, 5, 16), torch.randn(2, 4, 16)).findings}
    assert ("double-final-norm" in rules) == (not norm_first)
    assert "missing-final-norm" not in rules
