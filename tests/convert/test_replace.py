"""replace: other norms and other placements, with the parameters that mean the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normkit
from normkit import Transformer
from normkit.convert import ConversionError, replace
from normkit.convert.replace.norms import divisor
from normkit.spec import TORCH_LAYER
from tests.convert.check import Snapshot, apart, outputs, trained

IDS = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 3, 7, 7, generator=torch.Generator().manual_seed(0))


def network():
    return trained(
        nn.Sequential(
            nn.Conv2d(3, 72, 3), nn.BatchNorm2d(72), nn.ReLU(), nn.Conv2d(72, 5, 3), nn.BatchNorm2d(5), nn.Flatten(),
            nn.Linear(45, 32), nn.BatchNorm1d(32), nn.LayerNorm(32), normkit.nn.RMSNorm(32, weight_offset=1.0),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("to", "places"),
    [
        ("group_norm", "1 4 7"),
        ("sync_batch_norm", "1 4 7"),
        ("frozen_batch_norm", "1 4 7"),
        ("rms_norm", "8"),
        ("dynamic_tanh", "8 9"),
    ],
)
def test_norms_give_way_and_come_back(to, places):
    model = network()
    model[4].eval()
    seen: list[str] = []
    for module in model:
        module.register_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    parameters = {n: p for n, p in model.named_parameters() if n.split(".")[0] in places.split()}
    snapshot = Snapshot(model)
    receipt = replace(model, X, to=to)
    assert [c.name for c in receipt.changed] == places.split()
    for name, parameter in model.named_parameters():
        if name in parameters and not name.startswith("9."):
            assert parameter is parameters[name]
    assert [m.training for m in model] == [n != 4 for n in range(len(model))]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    seen.clear()
    copied = copy.deepcopy(model)
    copied(X)
    assert seen == [type(m).__name__ for m in model], "every hook moved on"
    check_measured(snapshot, model, receipt, to)


def check_measured(snapshot, model, receipt, to):
    """The measured change is the change: run both ways on copies."""
    torch.manual_seed(0)
    changed = outputs(copy.deepcopy(model), X)
    receipt.undo()
    snapshot.assert_same()
    torch.manual_seed(0)
    original = outputs(copy.deepcopy(model), X)
    found = apart(changed, original)
    assert found == pytest.approx(receipt.errors.original.outputs, rel=1e-3, abs=1e-7)
    assert found < 1e-5 if to == "sync_batch_norm" else found > 0.05


def test_groups_divide_the_channels():
    """72 channels have no 32 groups; 32 channels without space would have groups of one element."""
    assert [divisor(c, 32, 49) for c in (72, 64, 5, 31, 37)] == [24, 32, 5, 31, 1]
    assert divisor(32, 32, 1) == 16 and divisor(7, 32, 1) == 1
    model = network()
    receipt = replace(model, X, to="group_norm")
    assert [c.what.split(" of ")[1] for c in receipt.changed] == [
        "24 groups (72 channels)",
        "5 groups (5 channels)",
        "16 groups (32 channels)",
    ]
    assert [model[n].num_groups for n in (1, 4, 7)] == [24, 5, 16]
    model = network()
    assert "18 groups" in replace(model, X, to="group_norm", groups=20, only=["1"]).changed[0].what


def test_sync_and_back():
    model = network()
    snapshot = Snapshot(model)
    kinds = [type(m) for m in model]
    replace(model, X, to="sync_batch_norm")
    assert [type(model[n]) for n in (1, 4, 7)] == [normkit.nn.SyncBatchNorm] * 3
    receipt = replace(model, X, to="batch_norm")
    assert [type(m) for m in model] == kinds and len(receipt.changed) == 3
    assert all(a is b for (_, a), (_, b) in zip(snapshot.tensors, snapshot._tensors(), strict=True))
    assert "no SyncBatchNorm" in replace(model, X, to="batch_norm").refused[0].reason


def test_frozen_statistics_are_the_stored_ones():
    model = network().eval()
    before = outputs(model, X)
    receipt = replace(model, X, to="frozen_batch_norm")
    assert receipt.errors.original.outputs < 1e-5 and apart(outputs(model, X), before) < 1e-5
    model.train()
    stored = model[1].running_mean.clone()
    model(X)
    assert torch.equal(model[1].running_mean, stored)
    assert normkit.audit(model, X)["1"].spec.frozen
    assert "already" in replace(model, X, to="frozen_batch_norm").refused[0].reason


def test_dynamic_tanh_has_the_effective_gain():
    model = network()
    gain = 1 + model[9].weight.detach()
    weight = model[8].weight
    replace(model, X, to="dynamic_tanh", alpha=0.7)
    torch.testing.assert_close(model[9].weight.detach(), gain)
    assert model[8].weight is weight and float(model[8].alpha) == pytest.approx(0.7)


def transformer(**fields):
    settings = {"vocab": 31, "dim": 24, "depth": 2, "heads": 4, "norm": TORCH_LAYER, "gated": False, "ffn_bias": True}
    return trained(Transformer(**{**settings, **fields})).eval()


@pytest.mark.parametrize("to", ["post", "sandwich", "sub", "parallel", "deepnorm", "mix", "resi_dual", "layerscale"])
def test_placements(to):
    model = transformer(depth=4 if to == "mix" else 2)
    snapshot, before = Snapshot(model), outputs(model, IDS)
    projections = {n.rpartition("sublayer.")[2] + n[:20]: p for n, p in model.named_parameters() if "sublayer" in n}
    receipt = replace(model, IDS, to=to)
    built = Transformer(**vars(model.config))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in built.named_parameters()}
    assert model.config.placement == to and receipt.changed
    kept = {id(p) for p in model.parameters()}
    assert all(id(p) in kept for p in projections.values()), "every projection means the same in every wiring"
    found = {b.placement for b in normkit.audit(model, IDS).branches}
    same = {"mix": {"post", "pre"}, "resi_dual": {"post", "none"}, "parallel": {"parallel"}}
    assert found == same.get(to, {to}), found
    assert apart(outputs(model, IDS), before) == pytest.approx(receipt.errors.original.outputs, rel=1e-3)
    assert receipt.errors.original.outputs > 0.01
    receipt.undo()
    snapshot.assert_same()
    assert apart(outputs(model, IDS), before) == 0 and model.config.placement == "pre"


def test_norms_that_both_wirings_have_are_carried_and_others_named():
    model = transformer()
    norm, final = model.stack.layers[0].ffn.input_norm.weight, model.stack.final_norm.weight
    replace(model, IDS, to="sandwich")
    assert model.stack.layers[0].ffn.input_norm.weight is norm and model.stack.final_norm.weight is final
    notes = " ".join(replace(model, IDS, to="post").notes)
    assert "new parameters: stack.layers.*.attention.stream_norm.bias" in notes
    assert "given up: stack.final_norm.bias" in notes and "outputs change" in notes


def test_a_pair_and_hooks_inside():
    model = transformer(kind="encoder_decoder", depth=2)
    seen: list[str] = []
    model.stack.layers[0].ffn.sublayer.up.register_forward_hook(lambda *_: seen.append("up"))
    receipt = replace(model, IDS, to="post", source=IDS)
    assert len(receipt.changed) == 2 * 2 + 2 * 3
    seen.clear()
    model(IDS, source=IDS)
    assert seen == ["up"]


def test_arguments_and_failures():
    model = network()
    snapshot = Snapshot(model)
    for fields, error, reason in (
        ({"to": "nothing"}, ValueError, "to must be one of group_norm"),
        ({"to": "post"}, TypeError, "for a normkit.Transformer"),
        ({"to": "group_norm", "groups": 0}, ValueError, "groups must be"),
        ({"to": "group_norm", "only": ["0"]}, ValueError, "only names 0"),
    ):
        with pytest.raises(error, match=reason):
            replace(model, X, **fields)
    with pytest.raises(TypeError, match="example inputs"):
        replace(model, to="group_norm")
    with pytest.raises(ConversionError, match="could not be run"):
        replace(model, torch.randn(2, 4, 7, 7), to="group_norm")
    fused = nn.Sequential(Fused(5))
    receipt = replace(fused, torch.randn(4, 5), to="sync_batch_norm")
    assert receipt.changed == ()
    snapshot.assert_same()


class Fused(nn.BatchNorm1d):
    """A batch norm with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2
