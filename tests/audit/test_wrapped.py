"""A model inside what compiles, replicates, shards, checkpoints or adapts it: the report of the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from normkit.audit import Audit, AuditError, audit

WIDTH = 12


class Block(nn.Module):
    """A pre-norm branch, and an RMSNorm written inline behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).relu())
        return x + y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.RMSNorm(WIDTH, eps=1e-5)
        self.spare = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def each_block(model: Net, wrap: Callable[[nn.Module], Any]) -> Net:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)
    return model


def fsdp1(model: Net, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)

    return wrap(each_block(model, wrap))


def fsdp2(model: Net, norms_too: bool) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    for block in model.blocks:
        if norms_too:
            fully_shard(block.norm, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpointed(model: Net) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return each_block(model, checkpoint_wrapper)


def accelerated(model: Net) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True, mixed_precision="no").prepare(model)


def fabric(model: Net) -> nn.Module:
    return pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1).setup_module(model)


WRAPS: dict[str, Callable[[Net], nn.Module]] = {
    "torch.compile": torch.compile,
    "torch.compile of each block": lambda m: each_block(m, torch.compile),
    "model.compile()": lambda m: [m, m.compile()][0],
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "DistributedDataParallel of torch.compile": lambda m: nn.parallel.DistributedDataParallel(torch.compile(m)),
    "torch.compile of DistributedDataParallel": lambda m: torch.compile(nn.parallel.DistributedDataParallel(m)),
    "FSDP1": fsdp1,
    "FSDP1 with the original parameters": lambda m: fsdp1(m, use_orig_params=True),
    "FSDP2": lambda m: fsdp2(m, norms_too=False),
    "FSDP2 of each norm": lambda m: fsdp2(m, norms_too=True),
    "activation checkpointing": checkpointed,
    "weight averaging": lambda m: torch.optim.swa_utils.AveragedModel(m).eval(),
    "accelerate": accelerated,
    "Fabric": fabric,
}


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.usefixtures("group")
def test_the_report_is_that_of_the_model(name: str) -> None:
    x = torch.randn(2, 5, WIDTH)
    expected = audit(net(), x)
    wrapped = WRAPS[name](net())
    before = wrapped(x)
    assert audit(wrapped, x).to_dict() == expected.to_dict()
    assert torch.equal(wrapped(x), before)
    places = {n.name: n.placement for n in expected.norms}
    assert {name for name, place in places.items() if place == "pre"} == {f"blocks.{i}.norm" for i in range(3)}
    assert {name for name, place in places.items() if place == "output"} == {f"blocks.{i}#0" for i in range(3)}
    assert places["last"] == "final"
    assert [u.name for u in expected.unreached] == ["spare"]


# ---- adapters: parameters are added, norms are where they were ----


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def lora(**options: Any) -> Any:
    return pytest.importorskip("peft").LoraConfig(
        target_modules=["q_proj", "o_proj", "down_proj"], r=3, init_lora_weights=False, **options
    )


ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "LoRA and norms that are trained": lambda: lora(modules_to_save=["input_layernorm", "norm"]),
    "norm tuning": lambda: pytest.importorskip("peft").LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "prompt tuning": lambda: pytest.importorskip("peft").PromptTuningConfig(
        num_virtual_tokens=3, task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_change_no_norm(name: str) -> None:
    peft = pytest.importorskip("peft")
    ids = torch.arange(12).reshape(2, 6)
    expected = audit(llama(), input_ids=ids, use_cache=False)
    adapted = peft.get_peft_model(llama(), ADAPTERS[name]()).eval()
    found = audit(adapted, input_ids=ids, use_cache=False)
    assert what_is_where(found) == what_is_where(expected)
    assert found.model == expected.model
    assert found.unreached == ()
    assert {f.rule for f in found.findings} <= {f.rule for f in expected.findings} | {"frozen-gains"}


def what_is_where(result: Audit) -> tuple[Any, ...]:
    norms = [(n.name, n.class_name, n.kind, n.spec, n.placement, n.calls) for n in result.norms]
    return norms, [(b.name, b.placement, b.slots) for b in result.branches]


# ---- Lightning ----


def test_a_lightning_module_is_a_module_and_needs_a_forward() -> None:
    lightning = pytest.importorskip("lightning")

    class OnlySteps(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).square().mean()

    class WithForward(OnlySteps):
        def forward(self, x: Tensor) -> Tensor:
            self.log("mean", x.mean())
            return self.net(x)

    x = torch.randn(2, 5, WIDTH)
    assert [n.name for n in audit(WithForward(), x).norms] == [f"net.{n.name}" for n in audit(net(), x).norms]
    with pytest.raises(AuditError, match=r"OnlySteps .* without a forward.*model\.net"):
        audit(OnlySteps(), x)


def test_a_container_without_a_forward_is_said_to_be_one() -> None:
    with pytest.raises(AuditError, match=r"without a forward, or is one: .*model\.0"):
        audit(nn.ModuleList([nn.LayerNorm(4)]), torch.randn(2, 4))
