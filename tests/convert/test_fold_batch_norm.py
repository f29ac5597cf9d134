"""fold_batch_norm: into the map before or after, or to a fixed affine map; exact, and refused where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit
from normkit.convert.fold import FixedAffine, batch, fold_batch_norm
from tests.convert.check import Snapshot, check_exact, trained

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def image(channels: int, dims: int) -> torch.Tensor:
    return torch.randn(2, channels, *[6] * dims, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_after_a_convolution(dims, transposed, groups, bias):
    kind = (TRANSPOSED if transposed else CONV)[dims]
    model = nn.Sequential(kind(6, 9, 3, stride=2, padding=1, groups=groups, bias=bias), NORM[dims](9))
    receipt = check_exact(fold_batch_norm, trained(model).eval(), image(6, dims))
    assert receipt.changed[0].what == "into the map before it, 0" and isinstance(model[1], nn.Identity)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("transposed", "kernel"), [(False, 3), (True, 1)])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_before_a_convolution(dims, transposed, kernel, groups):
    kind = (TRANSPOSED if transposed else CONV)[dims]
    model = nn.Sequential(NORM[dims](6), kind(6, 9, kernel, groups=groups, bias=False))
    receipt = check_exact(fold_batch_norm, trained(model).eval(), image(6, dims))
    assert receipt.changed[0].what == "into what follows, 1" and isinstance(model[0], nn.Identity)
    assert model[1].bias is not None


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9)),
        nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 9, bias=False)),
        nn.Sequential(nn.Linear(6, 9), normkit.nn.BatchNorm1d(9, weight_offset=1.0)),
        nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9, affine=False)),
        nn.Sequential(nn.Linear(6, 9), normkit.nn.build(normkit.spec.FROZEN_BATCH, 9)),
    ],
    ids=["after", "before", "1+w", "plain", "frozen"],
)
def test_linear_maps(model):
    receipt = check_exact(fold_batch_norm, trained(model).eval(), torch.randn(5, 6))
    assert len(receipt.changed) == 1 and any(isinstance(m, nn.Identity) for m in model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 9, 3, padding=1)), "pads with zeros"),
        (nn.Sequential(nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 9, 3)), "transposed"),
        (nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 9, 3)), "bends"),
        (nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU(), nn.BatchNorm2d(6)), "returns its output"),
    ],
    ids=["padded", "transposed", "relu after", "relu before"],
)
def test_without_an_exact_neighbour_it_becomes_a_fixed_affine_map(model, reason):
    receipt = check_exact(fold_batch_norm, trained(model).eval(), image(6, 2))
    (change,) = receipt.changed
    assert change.what.startswith("to a fixed affine map") and reason in change.what
    assert sum(isinstance(m, FixedAffine) for m in model) == 1


def test_a_zero_shift_passes_the_padding():
    model = trained(nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 9, 3, padding=1))).eval()
    with torch.no_grad():
        model[0].bias.copy_(model[0].running_mean * model[0].weight / (model[0].running_var + model[0].eps).sqrt())
        model[0].running_mean.zero_()
        model[0].bias.zero_()
    assert check_exact(fold_batch_norm, model, image(6, 2)).changed[0].what == "into what follows, 1"


def test_a_map_that_is_read_elsewhere_or_used_twice_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.a, self.b = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.BatchNorm2d(6)

        def forward(self, x):
            return self.b(self.conv(self.a(self.conv(x)).relu()))

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)

        def forward(self, x):
            h = self.conv(x)
            return h + self.norm(h)

    for model in (Twice(), Skips()):
        receipt = check_exact(fold_batch_norm, trained(model).eval(), image(6, 2))
        assert all("fixed affine map" in change.what for change in receipt.changed)


def test_a_block_that_runs_twice_folds_once():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6)

        def forward(self, x):
            for _ in range(2):
                x = self.norm(self.conv(x)).relu()
            return x

    receipt = check_exact(fold_batch_norm, trained(Block()).eval(), image(6, 2))
    assert receipt.changed[0].what == "into the map before it, conv"


def test_training_statistics_and_values_that_are_not_finite_are_refused():
    model = trained(nn.Sequential(nn.Conv2d(6, 9, 1), nn.BatchNorm2d(9)))
    snapshot = Snapshot(model)
    receipt = fold_batch_norm(model, image(6, 2))
    assert "call eval() first" in receipt.refused[0].reason
    snapshot.assert_same()
    model.eval()
    model[1].running_mean[2] = torch.nan
    assert "not finite" in fold_batch_norm(model, image(6, 2)).refused[0].reason


def test_hooks_and_mode_move_on():
    model = trained(nn.Sequential(nn.Conv2d(6, 9, 1), nn.BatchNorm2d(9))).eval()
    seen = []
    handle = model[1].register_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    fold_batch_norm(model, image(6, 2))
    seen.clear()
    model(image(6, 2))
    assert seen == ["Identity"] and not model[1].training
    handle.remove()
    model(image(6, 2))
    assert seen == ["Identity"]


def test_a_wrong_axis_is_refused_by_the_proof(monkeypatch):
    """The bias comes out wrong by a permutation; nothing but the numbers could tell."""
    model = trained(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6))).eval()
    snapshot = Snapshot(model)
    right = batch.scale_out
    monkeypatch.setattr(batch, "scale_out", lambda w, s, m: right(w, s.flip(0), m))
    receipt = fold_batch_norm(model, image(6, 2))
    assert receipt.changed == () and "the proof failed" in receipt.refused[0].reason
    snapshot.assert_same()


def test_norms_without_statistics_and_models_that_are_one():
    """What is left is listed, with the reason."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    (refused,) = fold_batch_norm(model, torch.randn(2, 3, 5, 5)).refused
    assert refused == ("1", "it keeps no running statistics: it divides by the batch's own")
    (refused,) = fold_batch_norm(nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 5, 5)).refused
    assert "it is the model itself" in refused.reason
