"""The monitor in other people's training loops."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from normkit.audit.monitor.monitor import EVERY, Monitor
from normkit.audit.monitor.sinks import as_sink, scalars
from normkit.audit.numbers.record import Numbers

_FIRST_ONLY = 2**62
"""An interval that measures the first forward of a step and none of the batches accumulated after it."""


class _Steps:
    """A monitor that is on for the first forward of every so many steps, and off between them."""

    def __init__(self, every: int, sink: Any, gradients: bool) -> None:
        self.every = every
        self.gradients = gradients
        self._sink = as_sink(sink)
        self._step = 0
        self._monitor: Monitor | None = None

    def begin(self, step: int, model: nn.Module) -> None:
        """A training step begins."""
        if step % self.every:
            return
        if self._monitor is None:
            self._monitor = Monitor(model, every=_FIRST_ONLY, sink=self._take, gradients=self.gradients)
        self._step, self._monitor.step = step, 0
        self._monitor.start()

    def end(self) -> bool:
        """It has ended, backward included; whether a forward of the model was seen."""
        if self._monitor is None or not self._monitor.running:
            return True
        self._monitor.close()
        return self._monitor.step > 0

    def _take(self, _: int, numbers: Numbers) -> None:
        self._sink(self._step, numbers)


def trainer_callback(*, every: int = EVERY, sink: Any = None, gradients: bool = True) -> Any:
    """A callback for the transformers ``Trainer``: ``Trainer(..., callbacks=[trainer_callback()])``.

    Args:
        every: optimizer steps between measurements; of accumulated batches the first is measured.
        sink: as in `Monitor`; by default the numbers join ``trainer.state.log_history``. To see them in TensorBoard,
            give a ``SummaryWriter``.
        gradients: as in `Monitor`.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import TrainerCallback

    logs: dict[str, float] = {}

    def keep(_: int, numbers: Numbers) -> None:
        logs.update(scalars(numbers))

    class NormCallback(TrainerCallback):
        """Measures norms during training."""

        def __init__(self) -> None:
            self.steps = _Steps(every, keep if sink is None else sink, gradients)

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.steps.begin(state.global_step, given["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.steps.end()
            if logs:
                state.log_history.append({**logs, "step": state.global_step})
                logs.clear()

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.steps.end()

    return NormCallback()


def lightning_callback(
    *,
    every: int = EVERY,
    sink: Any = None,
    gradients: bool = True,
    module: Callable[[Any], nn.Module] = lambda lightning_module: lightning_module,
) -> Any:
    """A callback for Lightning's ``Trainer``: ``Trainer(callbacks=[lightning_callback()])``.

    Args:
        every: batches between measurements.
        sink: as in `Monitor`; by default the numbers go to the Trainer's loggers.
        gradients: as in `Monitor`.
        module: gives, of the LightningModule, the module that ``training_step`` calls. By default itself:
            ``self(batch)``; for ``self.net(batch)`` give ``lambda m: m.net``.

    Raises:
        ModuleNotFoundError: lightning is not installed.
    """
    from lightning.pytorch import Callback

    class NormCallback(Callback):
        """Measures norms during training."""

        def __init__(self) -> None:
            self.steps = _Steps(every, self._log if sink is None else sink, gradients)
            self.trainer: Any = None
            self.warned = False

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.trainer = trainer
            self.steps.begin(trainer.fit_loop.total_batch_idx, module(pl_module))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not self.steps.end() and not self.warned:
                self.warned = True
                warnings.warn(
                    f"training_step did not call {type(module(pl_module)).__name__}, so no norm was measured; "
                    "give lightning_callback(module=lambda m: m.net) the module that it calls",
                    stacklevel=2,
                )

        def _log(self, step: int, numbers: Numbers) -> None:
            for logger in self.trainer.loggers:
                logger.log_metrics(scalars(numbers), step=step)

    return NormCallback()
