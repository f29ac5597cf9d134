"""param_groups: every parameter of the labelled architectures, and the cases that names and ndim get wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit import functional as F
from normkit.audit.groups import norms_of, param_groups
from normkit.nn import RMSNorm, build
from normkit.residual import Transformer
from normkit.spec import FROZEN_BATCH, GEMMA, LLAMA, NEMOTRON
from tests.zoo import ZOO
from tests.zoo import build as build_model


def groups(model, **options):
    found = param_groups(model, **{"weight_decay": 0.1} | options)
    return {g["name"]: g for g in found}


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_of_the_labelled_architectures(name):
    entry = build_model(name)
    found = groups(entry.model, offset_gain_decay=0.2)
    where = {id(p): g["name"] for g in found.values() for p in g["params"]}
    in_norms = {id(p) for _, _, module in entry.labels for p in module.parameters()}
    offset = {
        id(p)
        for label, _, module in entry.labels
        if label["weight_offset"] == 1
        for n, p in module.named_parameters()
        if "bias" not in n
    }
    biases = {
        id(p) for module in entry.model.modules() for n, p in module.named_parameters(recurse=False) if n == "bias"
    }
    for path, p in entry.model.named_parameters():
        if not p.requires_grad:
            assert id(p) not in where, path
            continue
        if id(p) in offset:
            wanted = "offset_gain"
        elif id(p) in in_norms or id(p) in biases or sum(s > 1 for s in p.shape) < 2:
            wanted = "no_decay"
        else:
            wanted = "decay"
        assert where.pop(id(p)) == wanted, path
    assert not where
    labelled = {id(m) for _, _, m in entry.labels if list(m.parameters(recurse=False))}
    assert {id(m) for m, _ in norms_of(entry.model)} == labelled


class Hidden(nn.Module):
    """A norm whose class, attribute and shape give nothing away: one gain a head, (4, 8)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 8))

    def forward(self, x):
        return F.rms_norm(x, 8, eps=1e-6) * self.table


class Linear(nn.Module):
    """A matrix in a class called after a norm."""

    def __init__(self):
        super().__init__()
        self.norm_weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.norm_weight


def test_neither_name_nor_ndim_decides():
    model = nn.ModuleDict({"proj": Hidden(), "layer_norm": Linear()})
    found = groups(model)
    assert found["no_decay"]["names"] == ["proj.table"]
    assert found["decay"]["names"] == ["layer_norm.norm_weight"]


@pytest.mark.parametrize("spec", [GEMMA, NEMOTRON])
def test_offset_gains(spec):
    model = nn.ModuleDict({"norm": build(spec, 8), "plain": build(LLAMA, 8), "linear": nn.Linear(8, 8)})
    default = groups(model)
    assert set(default) == {"decay", "no_decay"}
    assert default["decay"]["names"] == ["linear.weight"]
    asked = groups(model, offset_gain_decay=0.5)
    assert asked["offset_gain"]["names"] == ["norm.weight"]
    assert asked["offset_gain"]["weight_decay"] == 0.5
    assert "plain.weight" in asked["no_decay"]["names"]
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=1.0, offset_gain_decay=1.0), lr=1e-2)
    with torch.no_grad():
        model["norm"].weight.fill_(0.5)
        model["plain"].weight.fill_(0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(300):
        optimizer.step()
    assert model["norm"].weight.abs().max() < 0.03, "the gain 1 + w went to 1"
    assert torch.equal(model["plain"].weight, torch.full((8,), 0.5)), "the plain gain stayed"


def test_tied_weights_embeddings_buffers_and_frozen_parameters():
    model = Transformer(vocab=20, dim=16, depth=1, heads=2, head_bias=True)
    model.extra = build(FROZEN_BATCH, 4)
    model.stack.layers[0].attention.sublayer.query.weight.requires_grad_(False)
    found = groups(model)
    names = [n for g in found.values() for n in g["names"]]
    assert names.count("embed.weight") == 1 and "head.weight" not in names
    assert "embed.weight" in found["decay"]["names"] and "head.bias" in found["no_decay"]["names"]
    assert not any("running" in n or "query" in n for n in names)
    assert "embed.weight" in groups(model, decay_embeddings=False)["no_decay"]["names"]
    untied = Transformer(vocab=20, dim=16, depth=1, heads=2, tie_embeddings=False)
    assert "head.weight" in groups(untied, decay_embeddings=False)["decay"]["names"]


def test_norms_of_one_class_and_shape_are_told_apart():
    """Equal modules are measured once; a spec, an eps or a closure of another kind makes them unequal."""
    model = nn.ModuleList([build(GEMMA, 8), build(LLAMA, 8), build(GEMMA.replace(eps=1e-3), 8), build(GEMMA, 8)])
    found = [(f.spec.weight_offset, round(f.spec.eps, 6)) for _, f in norms_of(model)]
    assert found == [(1, 1e-6), (0, 1e-6), (1, 1e-3), (1, 1e-6)]


def test_norms_that_differ_in_an_object_are_told_apart():
    class Config:
        def __init__(self, offset):
            self.offset = offset

    class Norm(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.weight = config, nn.Parameter(torch.ones(8))

        def forward(self, x):
            return F.rms_norm(x, 8, self.weight, 1e-6, weight_offset=self.config.offset)

    found = norms_of(nn.ModuleList([Norm(Config(1.0)), Norm(Config(0.0))]))
    assert [f.spec.weight_offset for _, f in found] == [1, 0]


def test_biases_with_several_dims():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 8, 8))
            self.up_bias = nn.Parameter(torch.zeros(3, 8))

        def forward(self, x):
            return torch.einsum("bd,edf->bef", x, self.up) + self.up_bias

    found = groups(Experts())
    assert found["decay"]["names"] == ["up"] and found["no_decay"]["names"] == ["up_bias"]


def test_a_table_of_positions_decays_unless_it_is_named():
    """It is added to the activations as a bias is: only the caller can say which it is."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(5, 8))
            self.norm, self.out = build(GEMMA, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.out(self.norm(x + self.positions))

    model = Model()
    assert groups(model)["decay"]["names"] == ["positions", "out.weight"]
    named = groups(model, no_decay=[model.positions, model.norm.weight], offset_gain_decay=0.1)
    assert named["decay"]["names"] == ["out.weight"] and "offset_gain" not in named
    assert set(named["no_decay"]["names"]) == {"positions", "norm.weight", "out.bias"}
    with pytest.raises(ValueError, match="no parameter of the model"):
        groups(model, no_decay=[nn.Parameter(torch.ones(2))])


def test_what_is_no_model_or_no_number():
    with pytest.raises(TypeError, match="not its parameters; got generator"):
        groups(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="weight_decay must be a number; got str"):
        groups(nn.Linear(2, 2), weight_decay="0.1")


def test_the_model_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), RMSNorm(4), nn.BatchNorm1d(4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    param_groups(model, weight_decay=0.1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("options", [{"weight_decay": -0.1}, {"offset_gain_decay": float("nan")}])
def test_bad_decay(options):
    with pytest.raises(ValueError, match="must be >= 0"):
        groups(nn.Linear(2, 2), **options)
