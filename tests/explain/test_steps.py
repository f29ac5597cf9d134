"""explain against the reference, and each step against the formula written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from normkit import reference
from normkit.explain import counted, explain, set_ids
from normkit.explain.show import geometry, number
from normkit.explain.words import title
from normkit.spec import GEMMA, LLAMA, NAMED, TORCH_GROUP, TORCH_LAYER, NormSpec
from tests.strategies import specs

SHAPES = ((5,), (3, 6), (2, 3, 6), (2, 6, 3, 2))


def _arguments(spec: NormSpec, x: torch.Tensor, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(x.dtype) * 0.3 + 1

    features = (
        tuple(x.shape[d] for d in spec.channel_dim)
        if isinstance(spec.channel_dim, tuple)
        else (x.shape[spec.channel_dim],)
    )
    heads = (x.shape[-2], x.shape[-1]) if x.dim() > 1 else features
    gain = {"features": features, "scalar": (1,), "per_head": heads}[spec.weight_shape]
    running = spec.frozen or (spec.running is not None and seed % 2 == 0)
    return {
        "weight": normal(*gain) if spec.has_weight else None,
        "bias": normal(*features) if spec.has_bias else None,
        "gate": normal(*x.shape) if spec.gate is not None else None,
        "running_mean": normal(*features) if running else None,
        "running_var": normal(*features).abs() if running else None,
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[NormSpec, torch.Tensor, dict[str, Any], tuple[int, ...]]:
    spec, shape = draw(specs()), draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 1).to(dtype)
    at = tuple(draw(st.integers(0, n - 1)) for n in shape)
    try:
        arguments = _arguments(spec, x, seed)
        reference.normalize(x, spec, **arguments)
    except (ValueError, IndexError):
        assume(False)
    return spec, x, arguments, at


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_result_is_the_references_bit_for_bit(case: Any) -> None:
    spec, x, arguments, at = case
    explained = explain(spec, x, at=at, **arguments)
    expected = reference.normalize(x, explained.spec, **arguments)
    assert torch.equal(explained.output, expected)
    here = [float(expected[i]) for i in explained.where]
    assert [number(v) for v in explained["y"].values] == [number(v) for v in here]
    assert at in explained.where


@settings(max_examples=150, deadline=None)
@given(cases())
def test_each_step_follows_from_the_ones_before(case: Any) -> None:
    """The formula written out on the printed numbers, in float64; float64 input, so that only rounding is between."""
    spec, x, arguments, at = case
    arguments = {k: None if t is None else t.double() for k, t in arguments.items()}
    explained = explain(spec, x.double(), at=at, **arguments)
    value = {s.symbol: torch.tensor(s.values, dtype=torch.float64) for s in explained.steps}
    spec, inside = explained.spec, counted(explained.spec, x.shape)
    enters = torch.tensor([bool(inside[i]) for i in explained.where])
    z = value.get("gated x", value["x"])
    stored = arguments["running_mean"] is not None
    if spec.centered and not stored:
        torch.testing.assert_close(value["c"], z[enters].mean().reshape(1))
    d = z - value["c"] if spec.centered or stored else z
    n = int(enters.sum())
    if not stored:
        total = d[enters].pow(2).sum().reshape(1)
        divided = {"mean_square": n, "unbiased": n - 1, "sum": 1}[spec.statistic]
        torch.testing.assert_close(value["s"], total / divided)
    root = value["s"].sqrt()
    expected = {
        "variance": (value["s"] + spec.eps).sqrt(), "std": root + spec.eps, "floor": root.clamp_min(spec.eps)
    }  # fmt: skip
    torch.testing.assert_close(value["d"], expected[spec.eps_at])
    if float(value["d"]) == 0:
        return
    torch.testing.assert_close(value["x̂"], d / value["d"])
    y = value["x̂"] * value.get("gain", torch.ones(())) + value.get("b", torch.zeros(()))
    torch.testing.assert_close(value["y"], y * value.get("a", torch.ones(())), atol=1e-12, rtol=1e-9)
    if spec.statistic != "sum" and spec.eps == 0 and not stored:
        assert math.isclose(explained.geometry.radius, explained.geometry.ideal_radius, rel_tol=1e-9)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_the_sets_are_what_the_reference_reduces_over(case: Any) -> None:
    """Changing an element changes the statistics of its own set and of no other."""
    spec, x, _, at = case
    x, plain = x.double(), spec.replace(has_weight=False, has_bias=False, gate=None, running=None, frozen=False)
    assume(not (spec.statistic == "unbiased" and (set_ids(spec, x.shape) == 0).sum() < 2))
    ids = set_ids(spec, x.shape)
    moved = x.clone()
    moved[at] += 3
    before, after = reference.statistics(x, plain), reference.statistics(moved, plain)
    like = reference.split(x, plain)
    changed = (before.square != after.square).expand_as(like).reshape(x.shape)
    assert not changed[ids != ids[at]].any()
    if counted(spec, x.shape)[at]:
        assert changed[ids == ids[at]].all() or not changed.any()


def test_the_worked_example() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer, rms = explain(TORCH_LAYER, x), explain(LLAMA, x)
    assert [number(v) for v in layer["x̂"].values] == ["-1.3416", "-0.4472", "0.4472", "1.3416"]
    assert number(rms["d"].values[0]) == "2.7386"
    assert number(layer.geometry.radius) == number(rms.geometry.radius) == "2.0000"
    assert layer.geometry.along_ones == pytest.approx(5.0) and rms.geometry.cosine == pytest.approx(1.0)


def test_gradient_is_what_the_formula_says() -> None:
    x = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w = torch.linspace(0.5, 1.5, 7, dtype=torch.float64)
    found = explain(GEMMA.replace(eps=0.01), x, w, at=(3,)).gradient
    d = (x.pow(2).mean() + 0.01).sqrt()
    unit, h = x / d, torch.eye(7, dtype=torch.float64)[3] * (1 + w)
    torch.testing.assert_close(torch.tensor(found.dx, dtype=torch.float64), (h - unit * (h * unit).mean()) / d)
    assert "(1 + w)" in found.formula and "mean(h)" not in found.formula
    centered = explain(TORCH_LAYER, x, at=(3,)).gradient
    assert "mean(h)" in centered.formula and abs(centered.along_ones) < 1e-12


def test_rounding_before_the_gain_is_a_step_of_its_own() -> None:
    x, w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16), torch.tensor([1.1, 0.9, 1.3], dtype=torch.bfloat16)
    rounded = explain(LLAMA, x, w)["round(x̂)"]
    assert rounded.dtype == "bfloat16" and rounded.values != explain(LLAMA, x, w)["x̂"].values
    with pytest.raises(KeyError, match="known are x, s, d"):
        explain(GEMMA, x, w)["round(x̂)"]


@pytest.mark.parametrize(
    ("spec", "shape", "at", "message"),
    [
        (TORCH_GROUP.replace(groups=4), (2, 6, 3), None, "groups=4 does not divide"),
        (TORCH_LAYER, (2, 3), (0,), "at must be an index"),
        (TORCH_LAYER, (2, 3), (0, 3), "at must be an index"),
        (TORCH_LAYER, (0, 3), None, "holds no element"),
        (NAMED["torch_batch"], (3,), None, "at least 2 dims"),
    ],
)
def test_refusals(spec: NormSpec, shape: tuple[int, ...], at: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(spec, torch.ones(shape), at=at)
    with pytest.raises(TypeError, match="floating point"):
        explain(TORCH_LAYER, torch.ones(3, dtype=torch.int64))


def test_every_named_convention_has_a_title() -> None:
    assert all(title(spec) for spec in NAMED.values())
    assert "no" not in title(TORCH_LAYER).split()


def test_stored_statistics_fix_no_radius() -> None:
    x, one = torch.tensor([[1.0], [2.0], [4.0]]), torch.ones(1)
    by_batch, by_running = (
        explain(NAMED["torch_batch"], x, **kw) for kw in ({}, {"running_mean": one, "running_var": one})
    )
    assert any("sphere of radius sqrt(3)" in line for line in geometry(by_batch))
    assert any("no fixed radius" in line for line in geometry(by_running))
    assert by_running["x̂"].values == pytest.approx((0.0, 1.0, 3.0), rel=1e-4)
