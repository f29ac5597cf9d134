"""A swapped model in two processes: DDP, and FSDP2 before and after the swap. Run by test_swap_survives.py."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from normkit.convert import ConversionError
from normkit.convert.swap import swap
from normkit.convert.swap.reclass import plan_of
from tests.convert.nets import Llama

QUICK = {"only_faster": False, "rounds": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.layer = Llama(16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.up(self.norm(x)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def whole(t: Tensor | None) -> Tensor | None:
    return t.full_tensor() if isinstance(t, DTensor) else t


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Parameters and loss after three steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = model(x).pow(2).mean() + model(x).sum() * 0.01
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.detach(), *(whole(p.detach()) for p in model.parameters())]  # type: ignore[misc]


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def swapped(model: nn.Module) -> int:
    return sum(plan_of(m) is not None for m in model.modules())


def ddp(x: Tensor) -> None:
    model = build()
    swap(model, x, **QUICK)
    wrapped = nn.parallel.DistributedDataParallel(model)
    close(train(wrapped, x), train(nn.parallel.DistributedDataParallel(build()), x))
    assert swapped(wrapped) == 4
    receipt = swap(nn.parallel.DistributedDataParallel(build()), x, **QUICK)
    assert len(receipt.swapped) == 4


def shard(model: nn.Module) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def fsdp_after(x: Tensor) -> None:
    """Swap, then shard the blocks: the norms are inside, and undo works."""
    model = build()
    receipt = swap(model, x, **QUICK)
    shard(model)
    close(train(model, x), train(shard(build()), x))
    assert swapped(model) == 4
    receipt.undo()
    assert swapped(model) == 0
    model(x)


def fsdp_before(x: Tensor) -> None:
    """Shard, then swap."""
    model = shard(build())
    plain = shard(build())
    receipt = swap(model, x, **QUICK)
    assert len(receipt.swapped) == 4, receipt.skipped
    close(train(model, x), train(plain, x))
    receipt.undo()
    assert swapped(model) == 0


def fsdp_of_the_norm(x: Tensor) -> None:
    """Sharding a norm itself gives it a class above the swapped one: undo says so, and changes nothing."""
    model, plain = build(), build()
    receipt = swap(model, x, **QUICK)
    for net in (model, plain):
        fully_shard(net[0].norm)
        shard(net)
    close(train(model, x), train(plain, x))
    before = [type(m) for m in model.modules()]
    with pytest.raises(ConversionError, match=r"0\.norm was given another class.*fully_shard"):
        receipt.undo()
    assert [type(m) for m in model.modules()] == before
    close([model(x)], [plain(x)])


CASES = {"ddp": ddp, "fsdp after": fsdp_after, "fsdp before": fsdp_before, "fsdp of the norm": fsdp_of_the_norm}


def work(rank: int, case: str, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    x = torch.randn(6, 16)
    CASES[case](x)
    os.write(1, b"fine\n")  # in one piece: two processes share the output
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1], sys.argv[2]), nprocs=2)
