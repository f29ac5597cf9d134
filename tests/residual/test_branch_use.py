"""Residual in other people's hands: sublayers that misbehave, layouts, odd sizes, wrong arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit import Placement, Transformer, placement, schedule
from normkit.residual import Residual, ResidualStack

from .blocks import Mlp, layer_norm, mlp, scramble

DIM = 12


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 3, DIM)


@pytest.mark.parametrize("name", ["none", "post", "output", "deepnorm", "rezero"])
def test_a_sublayer_that_writes_into_its_input_is_refused(name):
    """The input is the identity path too: x + F(x) would become F(x) + F(x)."""
    made = Residual(lambda h: h.mul_(0.5), name, DIM, depth=4)
    with pytest.raises(ValueError, match="changed its input in place, which is also the residual stream"):
        made(inputs())
    with torch.no_grad(), pytest.raises(ValueError, match="changed its input in place"):
        made(inputs())


def test_a_sublayer_may_write_into_a_normalized_input():
    x = inputs()
    made = Residual(lambda h: h.mul_(0.5), "pre", DIM)
    torch.testing.assert_close(made(x), x + made.input_norm(x) * 0.5)


def test_the_second_branch_of_a_parallel_block_reads_what_the_first_has_not_touched():
    made = Residual(lambda h: h.mul_(0.5), "parallel", DIM, parallel=lambda h: h)
    with pytest.raises(ValueError, match="changed its input in place, which the parallel sublayer reads too"):
        made(inputs())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((), "it returned an empty tuple"),
        ([1], "a tuple that starts with it; it returned list"),
        (None, "it returned NoneType"),
        ({}, "it returned dict"),
        (torch.ones(2, 3, DIM, dtype=torch.long), "must return a floating point tensor; it returned torch.int64"),
        (torch.ones(2, 3, DIM, dtype=torch.complex64), "it returned torch.complex64"),
        (torch.ones(2, 3, DIM, device="meta"), "returned a tensor on meta; its input is on cpu"),
    ],
)
def test_results_that_are_no_branch(result, message):
    with pytest.raises(ValueError, match=message):
        Residual(lambda h: result, "none")(inputs())


@pytest.mark.parametrize("learned", ["rezero", "layerscale"])
def test_channels_first_with_a_module_of_ones_own(learned):
    made = Residual(nn.Conv2d(6, 6, 3, padding=1), learned, 6, norm=nn.BatchNorm2d, channel_dim=1)
    made.branch_scale.data.uniform_(-1, 1)
    x = torch.randn(2, 6, 5, 7)
    h = x if made.input_norm is None else made.input_norm(x)
    scale = made.branch_scale[:, None, None]
    torch.testing.assert_close(made(x), x + scale * made.sublayer(h))
    with pytest.raises(ValueError, match=r"dim 1 must have 6 features"):
        made(torch.randn(2, 5, 7, 6))
    with pytest.raises(ValueError, match=r"norm over \(5,\)"):
        Residual(nn.Conv2d(6, 6, 1), "pre", 6, norm=lambda d: nn.BatchNorm2d(5), channel_dim=1)


@pytest.mark.parametrize("shape", [(DIM,), (1, DIM), (0, 4, DIM), (2, 0, DIM), (1, 1, DIM)])
def test_sizes(shape):
    """One position, no sample, no position; a state without a batch is dropped as a whole."""
    x = torch.randn(shape)
    made = ResidualStack([Residual(Mlp(DIM, 9, torch.float32), "sandwich", DIM, drop_path=0.5) for _ in range(2)])
    assert made(x).shape == x.shape
    if len(shape) == 1:
        rows = [Residual(torch.ones_like, "none", drop_path=0.5)(torch.zeros(DIM)).unique() for _ in range(20)]
        assert all(len(row) == 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "pre", "dim": "12"}, "dim must be an integer >= 1; got '12'"),
        ({"placement": "pre", "dim": 12.0}, "dim must be an integer >= 1; got 12.0"),
        ({"placement": "pre", "dim": True}, "dim must be an integer >= 1; got True"),
        ({"placement": "none", "dim": 0}, "dim must be an integer >= 1; got 0"),
        ({"placement": "hybrid", "dim": 4}, "needs kind, one of 'attention'"),
        ({"placement": "hybrid", "dim": 4, "kind": "attention"}, "placement 'hybrid' wants qkv inside Linear"),
        ({"placement": "deepnorm", "dim": 4, "depth": 1.5}, "depth must be an integer >= 1; got 1.5"),
        ({"placement": "pre", "dim": 4, "depth": 0}, "depth must be an integer >= 1; got 0"),
        ({"placement": "pre", "dim": 4, "layer": -1}, "layer must be an integer >= 1; got -1"),
        ({"placement": "scaled", "dim": 4, "layer": 3, "depth": 2}, "layer 3 lies past depth 2"),
        ({"placement": "pre", "dim": 4, "stream_dtype": torch.int32}, "stream_dtype must be floating point"),
        ({"placement": "pre", "dim": 4, "drop_path": float("nan")}, "drop_path must be a probability"),
        ({"placement": None, "dim": 4}, "unknown placement None"),
        ({"placement": "pre_norm", "dim": 4}, "unknown placement 'pre_norm'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Residual(nn.Linear(4, 4), **arguments)


def test_bad_types():
    with pytest.raises(TypeError, match=r"an instance, not the class: Linear\(\.\.\.\)"):
        Residual(nn.Linear, "pre", 4)
    with pytest.raises(TypeError, match="roles must hold"):
        Residual(nn.Linear(4, 4), "pre", 4, roles="weight")
    with pytest.raises(TypeError, match="x must be a floating point tensor; got list"):
        Residual(nn.Linear(4, 4), "pre", 4)([1.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": -1.0}, "alpha must be a finite number > 0; got -1.0"),
        ({"alpha": float("nan")}, "alpha must be"),
        ({"input_gain": float("inf")}, "input_gain must be a finite number"),
        ({"init_gain": -0.5}, "init_gain must be a finite number >= 0"),
        ({"branch_scale": float("nan")}, "branch_scale must be a finite number"),
        ({"branch_scale_kind": "vector"}, "branch_scale_kind must be one of 'fixed', 'scalar', 'channel'"),
        ({"init_roles": ("val",)}, "init_roles may hold 'query', .*; got 'val'"),
        ({"zero_roles": "output"}, "zero_roles may hold"),
        ({"name": ""}, "name must be a string that is not empty"),
    ],
)
def test_bad_placements_of_ones_own(fields, message):
    with pytest.raises(ValueError, match=message):
        Placement(**{"name": "mine"} | fields)


def test_a_placement_of_ones_own_in_a_whole_model():
    wiring = Placement(name="mine", input_norm=True, alpha=1.5, branch_scale=0.5, final_norm=True)
    torch.manual_seed(0)
    model = Transformer(vocab=20, dim=16, depth=2, heads=2, placement=wiring).double()
    scramble(model)
    assert schedule(wiring, 2).branch(2, "ffn") is wiring and model.stack.final_norm is not None
    x = model.embed(torch.tensor([[1, 2, 3]]))
    layer = model.stack.layers[0]
    want = 1.5 * x + 0.5 * layer.attention.sublayer(layer.attention.input_norm(x))
    torch.testing.assert_close(layer.attention(x), want)


def test_one_word_for_what_a_branch_holds():
    """``kind`` in Residual, init_for, placement and the methods of a schedule."""
    assert placement("hybrid", kind="ffn") == schedule("hybrid", 3).branch(2, kind="ffn")
    with pytest.raises(ValueError, match="layer must be an integer >= 1; got 0"):
        schedule("pre", 3).branch(0, "ffn")


def test_gradients_reach_a_branch_around_frozen_parts():
    """A frozen sublayer passes gradients on and takes none; frozen norms likewise."""
    made = Residual(Mlp(DIM, 9), "sandwich", DIM, dtype=torch.float64)
    made.requires_grad_(False)
    x = inputs().double().requires_grad_()
    made(x).square().sum().backward()
    wanted = x.detach().requires_grad_()
    (
        wanted + layer_norm(mlp(layer_norm(wanted, made.input_norm), made.sublayer), made.output_norm)
    ).square().sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)
    assert all(p.grad is None for p in made.parameters())
