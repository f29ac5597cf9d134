"""Masks, one-sample batches, non-finite batches, running statistics: what real data does to batch norms."""

import copy

import pytest
import torch

from normkit import functional as F
from normkit import nn
from normkit.spec import TORCH_BATCH, TORCH_GROUP, TORCH_INSTANCE


def test_padding_does_not_count():
    """[3, 5, 0, 0] with mask 1100 has mean 4, not 2."""
    x = torch.tensor([[[3.0, 5.0, 0.0, 0.0]]])
    module = nn.BatchNorm1d(1, momentum=1.0)
    y = module(x, mask=torch.tensor([[1, 1, 0, 0]]))
    assert module.running_mean.item() == 4 and module.running_var.item() == 2
    torch.testing.assert_close(y, torch.tensor([[[-1.0, 1.0, 0.0, 0.0]]]), rtol=1e-4, atol=0)


SHAPES = [(4, 5, 6), (4, 5, 3, 2), (4, 5, 2, 3, 2)]


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_masked_batch_is_the_batch_of_valid_positions(shape, last):
    """Outputs, gradients and running statistics; whatever the padding holds, NaN too."""
    torch.manual_seed(0)
    channels = shape[1]
    x = torch.randn(shape, dtype=torch.float64).movedim(1, -1)
    mask = torch.rand(x.shape[:-1]) > 0.4
    cotangent = torch.randn_like(x)
    module, plain = nn.BatchNorm(channels, channel_dim=-1).double(), nn.BatchNorm(channels).double()
    with torch.no_grad():
        for m in (module, plain):
            m.weight.copy_(torch.arange(1.0, channels + 1))
    packed = x[mask].clone().requires_grad_()
    wanted = plain(packed)
    wanted.backward(cotangent[mask])
    padded = torch.where(mask[..., None], x, float("nan"))
    if not last:
        padded, module.channel_dim = padded.movedim(-1, 1), 1
    padded = padded.clone().requires_grad_()
    y = module(padded, mask=mask)
    y.backward(cotangent if last else cotangent.movedim(-1, 1))
    y, grad = (t if last else t.movedim(1, -1) for t in (y.detach(), padded.grad))
    torch.testing.assert_close(y[mask], wanted.detach())
    torch.testing.assert_close(grad[mask], packed.grad)
    assert (y[~mask] == 0).all() and (grad[~mask] == 0).all()
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)
    for a, b in zip(module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["instance", "group"])
def test_masked_instance_and_group_norm(kind):
    """Each sample alone, cut to its valid length."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, 8, dtype=torch.float64, requires_grad=True)
    lengths = [8, 5, 2]
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    w, b = torch.randn(2, 6, dtype=torch.float64).unbind()

    def apply(t, **options):
        if kind == "instance":
            return F.instance_norm(t, weight=w, bias=b, **options)
        return F.group_norm(t, 2, w, b, **options)

    y = apply(x, mask=mask)
    (y.pow(3)).sum().backward()
    for i, n in enumerate(lengths):
        own = x.detach()[i : i + 1, :, :n].clone().requires_grad_()
        wanted = apply(own)
        wanted.pow(3).sum().backward()
        torch.testing.assert_close(y[i : i + 1, :, :n], wanted)
        torch.testing.assert_close(x.grad[i : i + 1, :, :n], own.grad)
        assert (y[i, :, n:] == 0).all() and (x.grad[i, :, n:] == 0).all()


def test_masked_half_precision_has_float32_gradients_of_its_gain():
    torch.manual_seed(0)
    x, mask = torch.randn(8, 6, 300).bfloat16(), torch.rand(8, 300) > 0.3
    module = nn.BatchNorm1d(6).bfloat16()
    exact = copy.deepcopy(module).double()
    g = torch.randn(8, 6, 300).bfloat16()
    module(x, mask=mask).backward(g)
    exact(x.double(), mask=mask).backward(g.double())
    # one rounding to bfloat16 of a float32 sum, and the rounding of the gradient itself
    torch.testing.assert_close(module.weight.grad.double(), exact.weight.grad, rtol=2**-8, atol=1e-3)


def test_a_group_that_is_masked_throughout_is_zero_with_zero_gradient():
    x = torch.randn(2, 4, 3, requires_grad=True)
    mask = torch.tensor([[True] * 3, [False] * 3])
    for y in (F.group_norm(x, 2, mask=mask), F.instance_norm(x, mask=mask)):
        assert torch.isfinite(y).all() and (y[1] == 0).all()
        (grad,) = torch.autograd.grad(y.pow(2).sum(), x)
        assert torch.isfinite(grad).all() and (grad[1] == 0).all()


def test_a_lone_sample_follows_the_stated_policy():
    """[1, C] in training: error (torch's answer, and the default), the running statistics, or pass it through."""
    x = torch.tensor([[3.0, -1.0]])
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*\(1, 2\).*single='running'"):
        nn.BatchNorm1d(2)(x)
    running = nn.BatchNorm1d(2, single="running")
    running.running_mean.fill_(1.0)
    running.running_var.fill_(4.0)
    torch.testing.assert_close(running(x), torch.tensor([[1.0, -1.0]]), rtol=1e-5, atol=1e-5)
    skip = nn.BatchNorm1d(2, single="skip")
    assert torch.equal(skip(x), x)
    for module in (running, skip):
        assert int(module.num_batches_tracked) == 0
    with pytest.raises(ValueError, match="single must be one of 'error', 'running', 'skip'"):
        nn.BatchNorm1d(2, single="mean")
    with pytest.raises(ValueError, match="more than 1 value"):  # nothing to run by
        nn.BatchNorm1d(2, single="running", track_running_stats=False)(x)


def test_a_lone_valid_position_under_a_mask_is_a_lone_sample():
    x, mask = torch.randn(2, 3, 4), torch.zeros(2, 4)
    mask[1, 2] = 1
    with pytest.raises(ValueError, match="1 valid positions"):
        nn.BatchNorm1d(3)(x, mask=mask)
    y = nn.BatchNorm1d(3, single="skip")(x, mask=mask)
    assert torch.equal(y[1, :, 2], x[1, :, 2]) and y.count_nonzero() == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_can_be_skipped(bad):
    """One NaN poisons torch's running statistics for good."""
    poisoned = torch.randn(4, 3)
    poisoned[1, 2] = bad
    kept, plain = nn.BatchNorm1d(3, skip_nonfinite=True), nn.BatchNorm1d(3)
    for module in (kept, plain):
        module(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    before = copy.deepcopy(kept.state_dict())
    kept(poisoned)
    plain(poisoned)
    assert not torch.isfinite(plain.running_mean).all() and int(plain.num_batches_tracked) == 2
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())
    kept(torch.randn(4, 3))
    assert int(kept.num_batches_tracked) == 2


def test_an_empty_batch_and_one_of_padding_do_not_count():
    for module in (nn.BatchNorm1d(3), nn.build(TORCH_BATCH, 3), nn.BatchNorm1d(3, momentum=None)):
        before = copy.deepcopy(module.state_dict())
        assert module(torch.randn(0, 3, 5)).shape == (0, 3, 5)
        y = module(torch.randn(2, 3, 5), mask=torch.zeros(2, 5))
        assert (y == 0).all()
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_momentum_none_is_a_plain_average_over_batches():
    torch.manual_seed(0)
    batches = [torch.randn(5, 3) + i for i in range(4)]
    module, spec_module = nn.BatchNorm1d(3, momentum=None), nn.build(TORCH_BATCH.replace(running="cumulative"), 3)
    for x in batches:
        module(x)
        spec_module(x)
    for m in (module, spec_module):
        torch.testing.assert_close(m.running_mean, torch.stack([x.mean(0) for x in batches]).mean(0))
        torch.testing.assert_close(m.running_var, torch.stack([x.var(0) for x in batches]).mean(0))


@pytest.mark.parametrize("unbiased", [False, True])
def test_running_statistics_of_a_spec_agree_with_the_module(unbiased):
    """One implementation: build(spec) and BatchNorm move the same bits; instance statistics average over samples."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5)
    spec = TORCH_BATCH.replace(statistic="unbiased" if unbiased else "mean_square")
    built, module = nn.build(spec, 3), nn.BatchNorm1d(3)
    built(x), module(x)
    for a, b in zip(built.buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    instance = nn.build(TORCH_INSTANCE.replace(running=0.1), 3)
    theirs = torch.nn.InstanceNorm1d(3, track_running_stats=True)
    instance(x), theirs(x)
    torch.testing.assert_close(instance.running_mean, theirs.running_mean)
    torch.testing.assert_close(instance.running_var, theirs.running_var)


def test_masked_instance_statistics_leave_out_empty_samples():
    x = torch.randn(3, 2, 6)
    mask = torch.ones(3, 6)
    mask[1] = 0
    masked = nn.InstanceNorm1d(2, track_running_stats=True)
    plain = nn.InstanceNorm1d(2, track_running_stats=True)
    masked(x, mask=mask)
    plain(x[[0, 2]])
    torch.testing.assert_close(masked.running_mean, plain.running_mean)
    torch.testing.assert_close(masked.running_var, plain.running_var)


def test_old_checkpoints_load_as_in_torch():
    """Version 1 has no num_batches_tracked; an old InstanceNorm has statistics that a new one does not keep."""
    for ours, theirs in ((nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)), (nn.SyncBatchNorm(3), torch.nn.BatchNorm2d(3))):
        state = theirs.state_dict()
        assert ours.state_dict()._metadata[""]["version"] == 2
        del state["num_batches_tracked"]
        state._metadata[""]["version"] = 1
        ours.load_state_dict(state)
        assert int(ours.num_batches_tracked) == 0
    old = torch.nn.InstanceNorm2d(3, track_running_stats=True).state_dict()
    old._metadata.clear()
    with pytest.raises(RuntimeError, match="running stats"):
        nn.InstanceNorm2d(3).load_state_dict(old)


def test_tools_that_look_for_batch_norms_find_them():
    """torch.optim.swa_utils.update_bn resets and recomputes the running statistics."""
    model = torch.nn.Sequential(nn.BatchNorm1d(3))
    model[0].running_mean.fill_(100)
    data = [torch.randn(5, 3), torch.randn(5, 3)]
    torch.optim.swa_utils.update_bn(data, model)
    torch.testing.assert_close(model[0].running_mean, torch.cat(data).mean(0))


def test_two_forwards_before_one_backward():
    """Moving the buffers in between invalidates no saved tensor, in training and in evaluation."""
    module = nn.BatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    (module(x).pow(2).sum() + module(x * 2).pow(3).sum()).backward()
    module.eval()
    y = module(x)
    module.running_mean.add_(1)  # as DistributedDataParallel broadcasts buffers before the next forward
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_group_norm_of_a_spec_takes_a_mask_too():
    x, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    built = nn.build(TORCH_GROUP.replace(groups=2), 4)
    torch.testing.assert_close(built(x, mask=mask), nn.GroupNorm(2, 4)(x, mask=mask))
