"""Monitor: the numbers of an audit, taken every so many training steps."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normkit.audit.core import AuditError, Survey, survey
from normkit.audit.monitor.sinks import as_sink
from normkit.audit.numbers.measure import Run
from normkit.audit.numbers.record import Numbers
from normkit.audit.result import NormRecord
from normkit.audit.trace.graph import ModuleCall, flat_tensors, written_arguments
from normkit.audit.trace.watch import Watch
from normkit.audit.trace.wrappers import plain_modules, unwrapped

EVERY = 250
"""The default interval: what a measured step costs is then under 2 % of training (``benchmarks/monitor.py``)."""


class Monitor:
    """Stream RMS, branch shares, gains, outliers, attention logits and gradients, live during training.

    ::

        with Monitor(model, every=250, sink=print):
            for batch in data:
                model(batch).loss.backward()
                ...

    Every ``every``-th forward in training mode is measured: under a dispatch mode for its length, with hooks on the
    modules, and with gradient hooks on the inputs of norms. Between those, one hook on the model counts, and
    nothing else runs: no synchronization, nothing kept. The numbers of a step go to the sink when the next forward
    begins, or on `flush`. The first forward is audited once, on its own inputs, to find what there is to measure.

    What it cannot see: a model whose own ``compile()`` was called (refused); replicas of ``nn.DataParallel``. A model
    compiled by ``torch.compile(model)`` runs its measured steps without compilation. Of a wrapper for data-parallel
    training each process sees its own batches. Norms written as operators have no gradients; what is computed again
    by activation checkpointing is seen once. A model that cannot be audited is not measured, with a warning.

    Args:
        model: the model that is called in training: compiled and DDP-wrapped ones too.
        every: how many training forwards apart; the first one is measured.
        sink: ``print``, a TensorBoard ``SummaryWriter``, or a callable that takes ``(step, numbers)``.
        gradients: whether to measure them too.

    Attributes:
        last: the latest `Numbers`, or None.
        step: how many training forwards there were; may be set.

    Raises:
        TypeError: ``model`` is no module, or ``sink`` is nothing that takes numbers.
        ValueError: ``every`` is below 1, the model's own ``compile()`` was called, or (when it starts) the model has
            a running monitor already.
    """

    def __init__(self, model: nn.Module, *, every: int = EVERY, sink: Any = print, gradients: bool = True) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
        if every < 1:
            raise ValueError(f"every must be at least 1; got {every}")
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise ValueError("model.compile() was called, which compiles hooks too; use torch.compile(model) instead")
        self.model = model
        self.every = every
        self.last: Numbers | None = None
        self.step = 0
        self._sink = as_sink(sink)
        self._inner = unwrapped(model)
        self._gradients = gradients
        self._found: Survey | None = None
        self._off = False
        self._open: contextlib.ExitStack | None = None
        self._pending: tuple[int, Run, _Gradients] | None = None
        self._handles: list[Any] = []

    # ---- on and off ----

    def __enter__(self) -> Monitor:
        others = (getattr(hook, "__self__", None) for hook in self.model._forward_pre_hooks.values())
        if any(isinstance(other, Monitor) and other is not self for other in others):
            raise ValueError("the model has a running Monitor already; give that one a sink that does both")
        if not self._handles:
            self._handles = [
                self.model.register_forward_pre_hook(self._before, with_kwargs=True),
                self.model.register_forward_hook(self._after, always_call=True),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    start = __enter__

    @property
    def running(self) -> bool:
        """Whether its hooks are on the model."""
        return bool(self._handles)

    def close(self) -> None:
        """Deliver what is pending, and remove every hook."""
        self._stop()
        self.flush()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def flush(self) -> None:
        """Deliver the numbers of a measured step, after its backward."""
        if self._pending is None:
            return
        step, run, gradients = self._pending
        self._pending = None
        assert self._found is not None
        measured = gradients if self._gradients else None
        self.last = Numbers(
            norms=tuple(run.norm_numbers(n, self._inner, measured) for n in self._found.norms),
            branches=run.branch_numbers(),
            attentions=run.attention_numbers(),
            batches=1,
            gradient_of="loss" if gradients.seen else None,
        )
        self._sink(step, self.last)

    # ---- one forward ----

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._off or not module.training or self._open is not None or not torch.is_grad_enabled():
            return
        step, self.step = self.step, self.step + 1
        if step % self.every:
            if self._pending is not None:
                self.flush()
            return
        self.flush()
        if self._found is None:
            try:
                self._found = survey(self._inner, args, kwargs)
            except AuditError as error:  # training goes on without
                warnings.warn(f"Monitor measures nothing: {error}", stacklevel=2)
                self._off = True
                return
        run = Run(self._found.norms, self._found.branches, self._found.sites)
        gradients = _Gradients(self._found.norms)
        self._pending = step, run, gradients
        stack = contextlib.ExitStack()
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        taps = _Taps(self._inner, self.model, run.watch(), gradients if self._gradients else None)
        stack.callback(taps.remove)
        stack.enter_context(taps)
        self._open = stack

    def _after(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._open is not None:
            stack, self._open = self._open, None
            stack.close()


class _Gradients:
    """Square sums of the gradients at norms' inputs, as they come in backward."""

    def __init__(self, norms: tuple[NormRecord, ...]) -> None:
        self.names = {id(n.module): n.name for n in norms if n.module is not None and not n.functional}
        self._sums: dict[str, tuple[Tensor, int]] = {}

    @property
    def seen(self) -> bool:
        """Whether any gradient came."""
        return bool(self._sums)

    def follow(self, module: nn.Module, tensors: list[Tensor]) -> None:
        """Look at the gradient of a norm's input, when it is computed."""
        name = self.names.get(id(module))
        if name is None or not tensors or not tensors[0].requires_grad:
            return

        def add(gradient: Tensor) -> None:
            before, count = self._sums.get(name, (0, 0))
            self._sums[name] = before + gradient.detach().float().square().sum(), count + gradient.numel()

        tensors[0].register_hook(add)

    def rms(self, norm: NormRecord) -> float | None:
        """RMS over the step; None where no gradient came."""
        if norm.name not in self._sums:
            return None
        total, count = self._sums[norm.name]
        return math.sqrt(float(total) / count)


class _Taps(TorchDispatchMode):
    """Shows a watch the operators of one forward, and the module call that each runs in.

    The module that is being called has none of the hooks: it would run them while they are taken off.
    """

    def __init__(self, model: nn.Module, called: nn.Module, watch: Watch, gradients: _Gradients | None) -> None:
        super().__init__()
        self._watch = watch
        self._gradients = gradients
        self._stack: list[ModuleCall] = []
        self._orders: dict[int, int] = {}
        self._calls = 0
        modules = list(plain_modules(model))
        self._names = {id(m): name for name, m in modules}
        self._handles = []
        for _, module in modules:
            if module is called:
                continue
            with contextlib.suppress(RuntimeError, AttributeError):  # scripted modules refuse some hooks
                self._handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ]

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        order = self._orders[id(module)] = self._orders.get(id(module), -1) + 1
        self._stack.append(ModuleCall(self._calls, self._names[id(module)], module, -1, order, 0))
        self._calls += 1
        if self._gradients is not None and id(module) in self._gradients.names:
            floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
            self._gradients.follow(module, floats)

    def _leave(self, module: nn.Module, *_: object) -> None:
        if all(call.module is not module for call in self._stack):
            return
        while self._stack.pop().module is not module:
            pass

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        seen = self._watch.before(func, self._stack[-1] if self._stack else None, args, kwargs)
        result = func(*args, **kwargs)
        if seen is not None:
            outputs = flat_tensors(result)
            for place in written_arguments(func):
                argument = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
                outputs += [t for t in flat_tensors(argument) if all(t is not other for other in outputs)]
            self._watch.after(seen, outputs)
        return result
