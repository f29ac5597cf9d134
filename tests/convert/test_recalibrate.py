"""recalibrate: running statistics are those of all the data, exactly."""

from __future__ import annotations

import copy
from collections import UserDict

import pytest
import torch
from torch import nn

import normkit
from normkit.convert import ConversionError, recalibrate
from normkit.convert.recalibrate import Pooled
from tests.convert.check import Snapshot, trained


def network():
    return trained(
        nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(), nn.Conv2d(6, 5, 3),
            normkit.nn.BatchNorm2d(5, momentum=None), nn.Flatten(), nn.Linear(45, 4), nn.BatchNorm1d(4),
        ).double()
    )  # fmt: skip


DATA = [
    torch.randn(n, 3, 7, 7, generator=torch.Generator().manual_seed(n)).double() * 2 + n for n in (5, 1, 8, 3)
]  # sizes differ: a plain average over batches would be wrong


def seen_by(model, data):
    """What each batch norm is given in eval mode, over all batches."""
    found: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args, n=name: found.setdefault(n, []).append(args[0]))
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    mode = model.training
    with torch.no_grad():
        for batch in data:
            model.eval()(batch)
    model.train(mode)
    for handle in handles:
        handle.remove()
    return {n: torch.cat([x.movedim(1, -1).flatten(0, -2) for x in xs]) for n, xs in found.items()}


def test_norms_in_a_row_have_the_statistics_of_what_they_see():
    model = network()
    kept = {n: b.clone() for n, b in model.named_buffers() if "tracked" in n}
    weights = [p.clone() for p in model.parameters()]
    model[3].eval()
    flags = [m.training for m in model.modules()]
    receipt = recalibrate(model, DATA)
    assert [c.name for c in receipt.changed] == ["1", "5", "8"] and "3 passes" in receipt.notes[0]
    assert receipt.errors.original.outputs > 0.1 and "17 values a channel" in receipt.changed[2].what
    assert [m.training for m in model.modules()] == flags and model[5].momentum is None
    for name, x in seen_by(model, DATA).items():
        norm = model.get_submodule(name)
        torch.testing.assert_close(norm.running_mean, x.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm.running_var, x.var(0), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(b, kept[n]) for n, b in model.named_buffers() if n in kept)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def test_the_first_norm_agrees_with_one_training_batch_of_all_the_data():
    model = network()
    whole = copy.deepcopy(model)
    recalibrate(model, DATA)
    whole[1].momentum = 1.0
    whole.train()(torch.cat(DATA))
    torch.testing.assert_close(model[1].running_mean, whole[1].running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model[1].running_var, whole[1].running_var, rtol=1e-12, atol=1e-12)


def test_by_batches_every_norm_divides_by_its_own_batch():
    model, data = network(), [DATA[0], DATA[2], DATA[3]]
    snapshot = Snapshot(model)
    receipt = recalibrate(model, data, method="batches")
    seen: list[torch.Tensor] = []
    for norm in (1, 5, 8):
        model[norm].train()
    model[3].eval()
    handle = model[5].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    stored = model[5].running_mean.clone(), model[5].running_var.clone()
    with torch.no_grad():
        for batch in data:
            model(batch)
    handle.remove()
    x = torch.cat([t.movedim(1, -1).flatten(0, -2) for t in seen])
    torch.testing.assert_close(stored[0], x.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stored[1], x.var(0), rtol=1e-12, atol=1e-12)
    model.train()
    for norm in (1, 5, 8):
        model[norm].num_batches_tracked.zero_()
    receipt.undo()
    snapshot.assert_same()


def test_undo_and_failure_leave_every_bit():
    model = network()
    snapshot = Snapshot(model)
    recalibrate(model, DATA).undo()
    snapshot.assert_same()
    broken = [DATA[0], DATA[1] * torch.nan]
    with pytest.raises(ConversionError, match="not finite"):
        recalibrate(model, broken)
    snapshot.assert_same()
    with pytest.raises(ConversionError, match="one value per channel"):
        recalibrate(trained(nn.Sequential(nn.BatchNorm1d(3))), [torch.randn(1, 3)])


def test_merged_moments_keep_a_small_spread_on_a_large_mean():
    x = 1e8 + torch.randn(1000, 2, dtype=torch.float64)
    pool = Pooled()
    for part in x.split([1, 399, 600]):
        pool.add(part, 1)
    exact = (x - 1e8).var(0)
    torch.testing.assert_close(pool.squares / (pool.count - 1), exact, rtol=1e-7, atol=0)


def test_batches_of_other_forms_and_what_is_left():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.frozen = nn.BatchNorm1d(3), normkit.nn.build(normkit.spec.FROZEN_BATCH, 3)

        def forward(self, x, scale=1.0):
            return self.frozen(self.norm(x)) * scale

    batches = [{"x": torch.randn(4, 3), "scale": 2.0}, (torch.randn(5, 3), 3.0), torch.randn(0, 3)]
    model = trained(Named())
    receipt = recalibrate(model, batches)
    assert [c.name for c in receipt.changed] == ["norm"] and "9 values" in receipt.changed[0].what
    assert [(r.name, r.reason.split(":")[0]) for r in receipt.refused] == [("frozen", "it is frozen")]
    labelled = [(torch.randn(4, 3), "label")]
    assert recalibrate(model, labelled, forward=lambda m, batch: m(batch[0])).changed


def test_arguments():
    for data, reason in ((iter(DATA), "iterator"), (DATA[0], "one tensor"), (3, "iterable")):
        with pytest.raises(TypeError, match=reason):
            recalibrate(network(), data)
    with pytest.raises(ConversionError, match="no batch"):
        recalibrate(network(), [])
    with pytest.raises(ValueError, match="method must be one of"):
        recalibrate(network(), DATA, method="ema")


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.lead, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, values):
        return self.norm(self.lead(values))


def test_batches_as_mappings():
    """What tokenizers and image processors give is a mapping, and no dict."""
    model = Named()
    batches = [UserDict(values=torch.randn(6, 4)) for _ in range(2)]
    recalibrate(model, batches)
    seen = model.lead(torch.cat([b["values"] for b in batches]))
    torch.testing.assert_close(model.norm.running_mean, seen.mean(0))


@pytest.mark.parametrize("method", ["sequential", "batches"])
def test_a_later_batch_that_raises(method):
    model = Named()
    snapshot = Snapshot(model)
    with pytest.raises(ConversionError, match=r"Named raised on batch 1: .*; nothing was changed"):
        recalibrate(model, [torch.randn(6, 4), torch.randn(6, 5)], method=method)
    snapshot.assert_same()
    with pytest.raises(ConversionError, match=r"raised on the first batch: .*forward=lambda model, batch"):
        recalibrate(model, [(torch.randn(6, 4), torch.zeros(6))])
    snapshot.assert_same()
    recalibrate(model, [(torch.randn(6, 4), torch.zeros(6))], forward=lambda model, batch: model(batch[0]))


def test_an_empty_batch_first():
    """Nothing can be seen on a batch without values: the next one shows the norms."""
    model = Named()
    batch = torch.randn(6, 4)
    receipt = recalibrate(model, [torch.randn(0, 4), batch])
    assert [c.name for c in receipt.changed] == ["norm"]
    torch.testing.assert_close(model.norm.running_mean, model.lead(batch).mean(0))
    with pytest.raises(ConversionError, match="no batch with values in it"):
        recalibrate(model, [torch.randn(0, 4)])


def test_norms_without_statistics_are_listed():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    (refused,) = recalibrate(model, [torch.randn(6, 4)]).refused
    assert refused == ("1", "it keeps no running statistics")
