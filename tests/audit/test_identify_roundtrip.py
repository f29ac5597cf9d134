"""identify(build(spec)) gives the spec back, over every field's whole domain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from normkit import NormSpec, identify
from normkit.nn.build import build
from tests.strategies import specs

CHANNELS, HEADS = 12, 7


def _example(spec: NormSpec, rank: int) -> tuple[int | tuple[int, ...], tuple[int, ...]]:
    """(features, input shape), with sizes that differ in every dim."""
    if isinstance(spec.channel_dim, tuple):
        features = (4, 6, 8)[-len(spec.channel_dim) :]
        return features, (3, 5, *features)
    if spec.weight_shape == "per_head":
        return CHANNELS, (3, 5, HEADS, CHANNELS)
    space = (5, 7)[: rank - 2]
    return CHANNELS, (3, *space, CHANNELS) if spec.channel_dim == -1 else (3, CHANNELS, *space)


def _check(spec: NormSpec, rank: int, device: str = "cpu") -> None:
    features, shape = _example(spec, rank)
    heads = HEADS if spec.weight_shape == "per_head" else None
    module = build(spec, features, heads=heads, device=device).eval()
    args = [torch.empty(shape, device="meta") for _ in range(1 if spec.gate is None else 2)]
    found = identify(module, *args)
    assert found.spec is not None, found.reason
    channels = CHANNELS if isinstance(features, int) else None
    wanted, got = spec.canonical(channels=channels), found.spec.canonical(channels=channels)
    assert got.eps == pytest.approx(wanted.eps, rel=0.02)
    assert got.replace(eps=wanted.eps) == wanted, found.reason
    assert found.gate == (None if spec.gate is None else 1)
    assert (found.weight, found.bias) == ("weight" if spec.has_weight else None, "bias" if spec.has_bias else None)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(specs())
def test_round_trip(spec: NormSpec) -> None:
    _check(spec, rank=4)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(specs())
def test_round_trip_on_the_meta_device(spec: NormSpec) -> None:
    _check(spec, rank=4, device="meta")


@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
@given(specs())
def test_round_trip_with_one_dim_of_space(spec: NormSpec) -> None:
    _check(spec, rank=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(specs())
def test_round_trip_at_length(spec: NormSpec) -> None:
    _check(spec, rank=4)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.5625e-07, 3.3e-5, 1e-2, 0.5])
@pytest.mark.parametrize("eps_at", ["variance", "std", "floor"])
@pytest.mark.parametrize("statistic", ["mean_square", "unbiased", "sum"])
def test_eps_at_width_4096(eps: float, eps_at: str, statistic: str) -> None:
    spec = NormSpec(centered=False, eps=eps, eps_at=eps_at, statistic=statistic)  # type: ignore[arg-type]
    found = identify(build(spec, 4096), torch.empty(1, 16, 4096, device="meta")).spec
    assert found is not None
    assert found.eps == pytest.approx(eps, rel=1e-3)
    assert found.statistic == statistic
    assert found.eps_at == (eps_at if eps else "variance")
