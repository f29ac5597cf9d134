"""SyncBatchNorm over real processes with gloo: forward, backward and running statistics equal one process's."""

import copy
import multiprocessing
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from normkit import nn

C = 5


def data(sizes, shape, masked, dtype):
    g = torch.Generator().manual_seed(0)
    parts, masks = [], []
    for n in sizes:
        # a large mean that differs between processes, which a float32 sum of squares would not survive
        parts.append((torch.randn((n, C, *shape), generator=g, dtype=torch.float64) + 1000 + 3 * n).to(dtype))
        mask = torch.rand((n, *shape), generator=g) > 0.4
        masks.append(mask if masked else None)
    cotangents = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype) for x in parts]
    return parts, masks, cotangents


def state(dtype):
    g = torch.Generator().manual_seed(1)
    return {
        "weight": torch.randn(C, generator=g).to(dtype),
        "bias": torch.randn(C, generator=g).to(dtype),
        "running_mean": torch.zeros(C, dtype=dtype),
        "running_var": torch.ones(C, dtype=dtype),
        "num_batches_tracked": torch.tensor(0),
    }


def run(module, x, mask, cotangent):
    x = x.clone().requires_grad_()
    y = module(x, mask=mask)
    y.backward(cotangent)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "dweight": module.weight.grad,
        "dbias": module.bias.grad,
        **{name: b.clone() for name, b in module.named_buffers()},
    }


def worker(rank, case, folder):
    sizes, shape, masked, dtype, options = case
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(sizes))
    try:
        parts, masks, cotangents = data(sizes, shape, masked, dtype)
        module = nn.SyncBatchNorm(C, dtype=dtype, **options)
        module.load_state_dict(state(dtype))
        torch.save(run(module, parts[rank], masks[rank], cotangents[rank]), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def spawn(function, count, *args):
    """Processes forked from a fresh server that has imported torch: this process may have threads by now."""
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "normkit"])
    mp.start_processes(function, args=args, nprocs=count, start_method="forkserver")


CASES = {
    "two": ((3, 3), (4,), False, torch.float64, {}),
    "uneven": ((1, 4, 2), (2, 3), False, torch.float32, {"momentum": None}),
    "empty": ((3, 0), (4,), False, torch.float32, {}),
    "one_row_each": ((1, 1), (), False, torch.float64, {}),
    "masked": ((2, 3, 0, 1), (4,), True, torch.float64, {}),
    "masked_half": ((2, 2), (6,), True, torch.bfloat16, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_with_the_whole_batch(name):
    case = CASES[name]
    sizes, shape, masked, dtype, options = case
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, len(sizes), case, folder)
        got = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(len(sizes))]
    parts, masks, cotangents = data(sizes, shape, masked, dtype)
    whole = nn.BatchNorm(C, dtype=torch.float64, **options)
    whole.load_state_dict(state(dtype))
    wanted = run(whole, torch.cat(parts).double(), torch.cat(masks) if masked else None, torch.cat(cotangents).double())
    # float32: some 30 roundings; bfloat16: one rounding of an output of order 4, two of a summed gradient
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2**-7}[dtype]

    def check(name, value, truth):
        scale = truth.abs().max().clamp_min(1)
        assert ((value.double() - truth).abs() <= tolerance * scale).all(), (name, value, truth)

    for key in ("y", "dx"):
        check(key, torch.cat([part[key] for part in got]), wanted[key])
    for key in ("dweight", "dbias"):  # each process has its own share
        check(key, sum(part[key].double() for part in got), wanted[key])
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        for part in got:
            check(key, part[key], wanted[key].double())
            assert torch.equal(part[key], got[0][key]), "the same bits on every process"


def lone_worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        x = torch.randn(1 - rank, C)  # one value per channel in the whole group
        refused = False
        try:
            nn.SyncBatchNorm(C)(x)
        except ValueError as error:
            refused = "more than 1 value" in str(error)
        skipped = nn.SyncBatchNorm(C, single="skip")(x)
        nothing = nn.SyncBatchNorm(C)
        nothing(x[:0])
        with torch.no_grad():  # a one-row batch that another process completes is no lone row
            y = nn.SyncBatchNorm(C)(torch.full((1, C), float(rank)))
        ok = refused and torch.equal(skipped, x) and int(nothing.num_batches_tracked) == 0
        ok = ok and torch.allclose(y, torch.full((1, C), 1.0 if rank else -1.0), atol=1e-4)
        torch.save(ok, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_a_lone_row_and_an_empty_group():
    with tempfile.TemporaryDirectory() as folder:
        spawn(lone_worker, 2, folder)
        assert all(torch.load(Path(folder) / f"{rank}.pt") for rank in range(2))


def training_worker(rank, folder, kind):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, C), nn.BatchNorm1d(C), nn.LayerNorm(C), nn.RMSNorm(C))
        model = nn.convert_sync_batchnorm(model)
        if kind == "ddp":
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            mesh = dist.init_device_mesh("cpu", (2,))
            for block in model:
                fully_shard(block, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))[2 * rank : 2 * rank + 2]
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(x).pow(2).mul(torch.arange(C)).mean().backward()
            optimizer.step()
        full = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
        torch.save(full, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_under_ddp_and_fsdp2(kind):
    """Two steps on two processes equal two steps on one with the whole batch."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(training_worker, 2, folder, kind)
        got = torch.load(Path(folder) / "0.pt")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, C), nn.BatchNorm1d(C), nn.LayerNorm(C), nn.RMSNorm(C))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        optimizer.zero_grad()
        model(x).pow(2).mul(torch.arange(C)).mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), msg=name)


class Fused(torch.nn.BatchNorm2d):
    """A batch norm with an activation fused in."""

    def forward(self, input):
        return torch.relu(super().forward(input))


def test_conversion_there_and_back_keeps_everything():
    seen = []
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(4), nn.BatchNorm1d(4, single="skip", channel_dim=-1)).double()
    model[0].eval()
    model[0].weight.requires_grad_(False)
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    model.note = "kept"
    parameters, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    synced = nn.convert_sync_batchnorm(model)
    assert [type(m) for m in synced] == [nn.SyncBatchNorm, nn.SyncBatchNorm]
    assert [m.training for m in synced] == [False, True]
    assert all(p is q for p, q in zip(parameters, synced.parameters(), strict=True))
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(
        synced[0](x), torch.nn.functional.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double())
    )
    assert seen == [1]
    back = nn.revert_sync_batchnorm(synced)
    assert [type(m) for m in back] == [torch.nn.BatchNorm2d, nn.BatchNorm1d]
    assert back[1].single == "skip" and back[1].channel_dim == -1 and not hasattr(back[0], "process_group")
    assert back.note == "kept" and not back[0].training and not back[0].weight.requires_grad
    assert str(back[0]) == str(torch.nn.BatchNorm2d(4))
    for name, value in back.state_dict().items():
        assert torch.equal(value, state[name]) and value.dtype == state[name].dtype
    back[0](x)
    assert seen == [1, 1]
    handle.remove()
    back[0](x)
    assert seen == [1, 1]


def test_conversion_refuses_what_it_would_drop():
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(4), Fused(4))
    with pytest.raises(ValueError, match="1 is a Fused"):
        nn.convert_sync_batchnorm(model)
    assert type(model[0]) is torch.nn.BatchNorm2d
    kept = nn.convert_sync_batchnorm(model, unknown="keep")
    assert [type(m) for m in kept] == [nn.SyncBatchNorm, Fused]


def test_conversion_of_a_root_a_shared_module_and_torchs_own():
    assert type(nn.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))) is nn.SyncBatchNorm
    assert type(nn.revert_sync_batchnorm(torch.nn.SyncBatchNorm(3))) is nn.BatchNorm
    shared = torch.nn.BatchNorm1d(3)
    both = nn.convert_sync_batchnorm(torch.nn.ModuleList([shared, shared]))
    assert both[0] is both[1]
    alone = nn.convert_sync_batchnorm(torch.nn.SyncBatchNorm(3))
    x = torch.randn(4, 3)
    torch.testing.assert_close(alone(x), torch.nn.functional.batch_norm(x, None, None, training=True))
