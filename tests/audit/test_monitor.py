"""Monitor: the audit's numbers live in training, in plain loops, wrappers and other people's trainers."""

from __future__ import annotations

import gc
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit
from normkit.audit.monitor import lightning_callback, scalars, trainer_callback
from normkit.audit.monitor.sinks import summary
from normkit.audit.numbers.record import Numbers
from tests.audit.test_numbers import DIM, data, net

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 99}  # fmt: skip


class Kept(list[tuple[int, Numbers]]):
    """A sink."""

    def __call__(self, step: int, numbers: Numbers) -> None:
        self.append((step, numbers))


def train(model: nn.Module, steps: int, x: Tensor | None = None) -> None:
    for i in range(steps):
        model.zero_grad()
        model(data(i) if x is None else x).square().mean().backward()


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_numbers_are_the_audits() -> None:
    """Streams, branches, norms and logits of a measured step equal those of an audit on the same batch."""
    model, kept = net(qk_norm=True).train(), Kept()
    with normkit.Monitor(model, every=10, sink=kept):
        train(model, 1, data(0))
    ((step, live),) = kept
    wanted = normkit.audit(model, data(0), data=[data(0)], gradients=False).numbers
    assert wanted is not None and step == 0
    assert live.branches == wanted.branches and len(live.branches) == 4
    assert live.attentions == wanted.attentions and len(live.attentions) == 2
    for a, b in zip(live.norms, wanted.norms, strict=True):
        assert (a.name, a.input_rms, a.input_max, a.output_rms, a.gain) == (
            b.name, b.input_rms, b.input_max, b.output_rms, b.gain,
        )  # fmt: skip


def test_gradients_are_those_of_the_loss() -> None:
    model, kept, inputs = net().train(), Kept(), []
    with normkit.Monitor(model, sink=kept):
        train(model, 1, data(0))
    found = kept[0][1].norm("blocks.1.mlp_norm")
    handle = model.blocks[1].mlp_norm.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    loss = model(data(0)).square().mean()
    handle.remove()
    (wanted,) = torch.autograd.grad(loss, inputs)
    assert found is not None and kept[0][1].gradient_of == "loss"
    assert found.gradient_rms == pytest.approx(wanted.double().square().mean().sqrt().item(), rel=1e-5)


def test_every_so_many_training_steps() -> None:
    model, kept = net().train(), Kept()
    with normkit.Monitor(model, every=3, sink=kept) as monitor:
        train(model, 4)
        with torch.no_grad():
            model(data())
        model.eval()(data())
        model.train()
        train(model, 3)
        assert monitor.step == 7
    assert [step for step, _ in kept] == [0, 3, 6]
    assert monitor.last is kept[-1][1]


def test_nothing_is_left_behind_and_nothing_runs_between() -> None:
    model = net().train()
    before = hooks(model)
    with normkit.Monitor(model, every=5, sink=Kept()):
        train(model, 2)  # the second delivers what the first measured
        assert hooks(model) == before + 2  # on the model alone: submodules have theirs in measured forwards only
        with torch.profiler.profile() as plain:
            train(model, 1)
    assert hooks(model) == before
    with torch.profiler.profile() as bare:
        train(model, 1)
    assert [e.name for e in plain.events()] == [e.name for e in bare.events()]


@pytest.mark.filterwarnings("ignore:Monitor measures nothing")
def test_hooks_go_when_a_step_raises() -> None:
    model = net().train()

    def fail(after: int) -> None:
        train(model, after)
        model(torch.randn(2, 7, 4))

    for steps in (0, 1):  # at the audit, and in a measured step
        with pytest.raises(RuntimeError, match="shapes"), normkit.Monitor(model, every=1, sink=Kept()) as monitor:
            fail(steps)
        assert hooks(model) == 0 and not monitor.running
    model(data())


def test_training_goes_on_where_nothing_can_be_measured() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.calls = nn.Linear(5, 5), [0]

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(1)
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise RuntimeError("not under a dispatch mode")
            return self.map(x)

    model, kept = Once().train(), Kept()
    with pytest.warns(UserWarning, match="measures nothing: Once raised"), normkit.Monitor(model, every=1, sink=kept):
        train(model, 2)
    assert not kept and model.map.weight.grad is not None


def test_no_graph_is_kept() -> None:
    """Once the caller drops the output of a measured step, its activations go."""
    model, alive = net().train(), []
    model.blocks[0].mlp_norm.register_forward_pre_hook(lambda _, given: alive.append(weakref.ref(given[0])))
    with normkit.Monitor(model, every=1, sink=Kept()):
        for backward in (False, True):
            out = model(data())
            assert alive[-1]() is not None
            if backward:
                out.sum().backward()
            del out
            gc.collect()
            assert alive[-1]() is None


def test_training_is_not_changed() -> None:
    a, b = net().train(), net().train()
    with normkit.Monitor(a, every=2, sink=Kept()):
        for model in (a, b):
            torch.manual_seed(0)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for i in range(4):
                optimizer.zero_grad()
                nn.functional.dropout(model(data(i)), 0.5).square().mean().backward()
                optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_compiled_model_is_measured_and_stays_compiled() -> None:
    model, kept, compiled = net().train(), Kept(), []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    wrapped = torch.compile(model, backend=backend)
    for block in model.blocks:  # they keep lists, which break graphs
        block.seen = {"stream": [], "branch": []}
    with normkit.Monitor(wrapped, every=2, sink=kept):
        train(wrapped, 1)
        assert not compiled  # the measured step ran without
        train(wrapped, 1)
        assert compiled
    assert len(kept[0][1].branches) == 4 and kept[0][1].norms[0].gradient_rms


def test_a_model_that_compiled_itself_is_refused() -> None:
    model = net()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"torch\.compile\(model\)"):
        normkit.Monitor(model)


def test_a_data_parallel_model() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        kept = Kept()
        wrapped = nn.parallel.DistributedDataParallel(net(qk_norm=True).train())
        with normkit.Monitor(wrapped, every=2, sink=kept):
            train(wrapped, 3)
        assert [step for step, _ in kept] == [0, 2]
        numbers = kept[-1][1]
        assert numbers.branches[0].name == "blocks.0.attention" and numbers.norms[0].gradient_rms
    finally:
        torch.distributed.destroy_process_group()


def test_activation_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(5, DIM), nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x + torch.utils.checkpoint.checkpoint(self.rest, x, use_reentrant=False)

    model, kept = Checkpointed().train(), Kept()
    with normkit.Monitor(model, sink=kept):
        train(model, 1)
    assert kept[0][1].norms[0].gradient_rms and len(kept[0][1].branches) == 1


def test_sinks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = net().train()
    with normkit.Monitor(model, sink=print):
        train(model, 1)
    line = capsys.readouterr().out
    assert line.startswith("step 0: stream RMS") and "logits" in line and line.count("\n") == 1
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer, normkit.Monitor(model, sink=writer) as monitor:
        train(model, 1)
    assert monitor.last is not None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = scalars(monitor.last)
    assert set(events.Tags()["scalars"]) == set(found)
    tag = "branch/blocks.0.attention/share"
    assert events.Scalars(tag)[0].value == pytest.approx(found[tag], rel=1e-6)
    assert summary(Numbers()) == ""


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"every": 0}, ValueError, "at least 1"),
        ({"sink": 3}, TypeError, "SummaryWriter"),
        ({"model": [1]}, TypeError, "torch.nn.Module"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        normkit.Monitor(**({"model": nn.LayerNorm(3)} | arguments))


def test_a_second_monitor_is_refused() -> None:
    model = net().train()
    with normkit.Monitor(model, sink=Kept()), pytest.raises(ValueError, match="already"):
        normkit.Monitor(model, sink=Kept()).start()
    with normkit.Monitor(model, sink=Kept()):
        pass


def test_the_transformers_trainer(tmp_path: Path) -> None:
    """A real run with accumulation: measured at steps 0, 2 and 4, and in the Trainer's own history."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY))
    rows = [{"input_ids": t, "labels": t} for t in torch.randint(0, 99, (16, 8))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    kept = Kept()
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[trainer_callback(every=2, sink=kept)]
    )
    trainer.train()
    assert [step for step, _ in kept] == [0, 2, 4]
    assert len(kept[0][1].branches) == 4 and kept[0][1].norms[0].gradient_rms
    arguments.max_steps = 3
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[trainer_callback(every=2)]
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "norm/model.norm/input_rms" in entry]
    assert [entry["step"] for entry in logged] == [1, 3]
    assert hooks(model) == 0


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed (pip install lightning)")

    class Module(lightning.LightningModule):
        def __init__(self, through_self: bool) -> None:
            super().__init__()
            self.net, self.through_self = net().train(), through_self

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return (self(batch) if self.through_self else self.net(batch)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    def fit(module: Any, callback: Any) -> None:
        loader = torch.utils.data.DataLoader(torch.randn(10, 7, 5), batch_size=2)
        trainer = lightning.Trainer(
            max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, loader)

    kept = Kept()
    fit(Module(True), lightning_callback(every=2, sink=kept))
    assert [step for step, _ in kept] == [0, 2, 4] and kept[0][1].norms[0].gradient_rms
    kept = Kept()
    fit(Module(False), lightning_callback(every=2, sink=kept, module=lambda m: m.net))
    assert [step for step, _ in kept] == [0, 2, 4]
    with pytest.warns(UserWarning, match=r"module=lambda m: m\.net"):
        fit(Module(False), lightning_callback(every=2, sink=kept))
