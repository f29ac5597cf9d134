"""The spec of a module is what it computes, and its state is torch's."""

import pytest
import torch

from normkit import functional as F
from normkit import nn
from normkit.nn.catalog import CATALOG
from normkit.spec import TORCH_BATCH

WHOLE = [
    e
    for e in CATALOG
    if e.name.startswith(
        ("layer_norm", "rms_norm", "group_norm", "instance_norm", "scale_norm", "l2_norm", "pixel_norm")
    )
    and not any(word in e.name for word in ("gru", "lstm"))
]


def test_every_norm_that_a_spec_describes_has_one():
    without = {type(e.make()).__name__ for e in CATALOG if not hasattr(e.make(), "spec")}
    # no statistic of the activations at all, or one that no NormSpec can say
    assert without == {"DynamicTanh", "Derf", "LayerScale", "TLU", "GlobalResponseNorm"}


@pytest.mark.parametrize("entry", WHOLE, ids=lambda e: e.name)
def test_the_spec_is_what_the_module_computes(entry):
    module = entry.make(torch.float32)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    (x,) = entry.inputs(torch.float32)
    wanted = F.norm(x, module.spec, getattr(module, "weight", None), getattr(module, "bias", None))
    assert torch.equal(module(x), wanted)


@pytest.mark.parametrize("running", [0.1, None])
def test_the_spec_of_batch_norms(running):
    module = nn.BatchNorm2d(6, momentum=running)
    assert module.spec == TORCH_BATCH.replace(running="cumulative" if running is None else running)
    assert nn.BatchNorm2d(6, track_running_stats=False).spec == TORCH_BATCH.replace(running=None)


def test_modules_are_built_again_from_their_specs():
    for module in (nn.LayerNorm(6, weight_offset=1.0), nn.RMSNorm(6, rounding="before_gain"), nn.GroupNorm(3, 6)):
        x = torch.randn(2, 6, 6)
        assert torch.equal(nn.build(module.spec, 6)(x), module(x))


TWINS = [
    ("LayerNorm", (6,), {}),
    ("LayerNorm", ((5, 6),), {}),
    ("LayerNorm", (6,), {"bias": False}),
    ("LayerNorm", (6,), {"elementwise_affine": False}),
    ("RMSNorm", (6,), {}),
    ("GroupNorm", (2, 6), {}),
    ("GroupNorm", (2, 6), {"affine": False}),
    ("BatchNorm1d", (6,), {}),
    ("BatchNorm2d", (6,), {"affine": False}),
    ("BatchNorm3d", (6,), {"track_running_stats": False}),
    ("InstanceNorm1d", (6,), {"affine": True}),
    ("InstanceNorm2d", (6,), {"track_running_stats": True}),
    ("SyncBatchNorm", (6,), {}),
]


@pytest.mark.parametrize(("name", "given", "options"), TWINS, ids=lambda v: str(v))
def test_state_dicts_load_both_ways(name, given, options):
    ours, theirs = getattr(nn, name)(*given, **options), getattr(torch.nn, name)(*given, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert repr(ours) == repr(theirs)
    missing = [a for a in vars(theirs) if not hasattr(ours, a)]
    assert missing == [], "attributes that other code reads"


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(6), nn.SyncBatchNorm(6), nn.build(TORCH_BATCH, 6), nn.GhostBatchNorm(6, 2)],
    ids=lambda m: type(m).__name__,
)
def test_checkpoints_without_a_count_load_strictly(module):
    """A plain dict from before num_batches_tracked, without torch's metadata."""
    state = dict(torch.nn.BatchNorm1d(6).state_dict())
    del state["num_batches_tracked"]
    module.num_batches_tracked.fill_(3)
    module.load_state_dict(state, strict=True)
    assert int(module.num_batches_tracked) == 3, "left as it was, as in torch"


def test_without_an_eps_rows_that_are_still_are_zero():
    """0 / 0 is 0, forward and backward, as torch's instance norm has it (its layer norm answers NaN)."""
    calls = {
        "layer": lambda x: F.layer_norm(x, 6, eps=0.0),
        "rms": lambda x: F.rms_norm(x, 6, eps=0.0),
        "group": lambda x: F.group_norm(x, 2, eps=0.0),
        "instance": lambda x: F.instance_norm(x[None], eps=0.0),
        "l2": lambda x: F.l2_norm(x, eps=0.0),
        "scale": lambda x: F.scale_norm(x, eps=0.0),
        "power": lambda x: F.power_norm(x, torch.zeros(6), torch.zeros(6), eps=0.0),
        "ghost": lambda x: nn.GhostBatchNorm(6, 2, eps=0.0)(x),
        "renorm": lambda x: nn.BatchRenorm(6, eps=0.0)(x),
    }
    for name, call in calls.items():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros(4, 6, dtype=dtype, requires_grad=True)
            y = call(x)
            assert torch.equal(y, torch.zeros_like(y)), name
            (grad,) = torch.autograd.grad(y.float().sum(), x)
            assert torch.isfinite(grad).all(), name
    assert torch.equal(F.layer_norm(torch.full((1, 6), 3.0), 6, eps=0.0), torch.zeros(1, 6))
    for tiny in (1e-44, 1e-38, 3e38):  # subnormal numbers too
        x = torch.tensor([[3.0, -1.0, 2.0]]) * (tiny / 3)
        torch.testing.assert_close(F.rms_norm(x, 3, eps=0.0), F.rms_norm(x.double(), 3, eps=0.0).float())
    many = torch.tensor([[0.0, 0.0], [3.0, -3.0]])
    torch.testing.assert_close(F.layer_norm(many, 2, eps=0.0), torch.tensor([[0.0, 0.0], [1.0, -1.0]]))
