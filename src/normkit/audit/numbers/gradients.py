"""The gradient at each norm's input, by depth."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normkit.audit.identify.probe import restored
from normkit.audit.result import NormRecord
from normkit.errors import described


class Gradients:
    """Forward and backward runs that leave the model as it was, its parameters' ``grad`` included.

    What is differentiated is the output's ``loss`` if it has one; else the sum of all outputs times standard normal
    numbers, over the root of their count, so that depth and width of the head do not matter.
    """

    def __init__(self, model: nn.Module, norms: Sequence[NormRecord]) -> None:
        self.model = model
        self.modules = {id(n.module): n.name for n in norms if n.module is not None and not n.functional}
        self.source: str | None = None
        self.note = ""
        self._squares: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def rms(self, norm: NormRecord) -> float | None:
        """RMS over all calls and batches; None where no gradient was seen."""
        count = self._counts.get(norm.name, 0)
        return math.sqrt(self._squares[norm.name] / count) if count else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One batch; an error is noted, once."""
        try:
            with restored(), _same_buffers(self.model), torch.enable_grad(), torch.random.fork_rng(devices=[]):
                self._run(args, kwargs)
        except (Exception, SystemExit) as error:  # foreign code: what it cannot give is left out
            self.note = f"no gradients: backward raised {described(error)}"

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen: list[tuple[str, Tensor]] = []

        def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            floats = [t for t in tree_leaves((given, named)) if isinstance(t, Tensor) and t.is_floating_point()]
            if floats and floats[0].requires_grad:
                seen.append((self.modules[id(module)], floats[0]))

        hooks = [
            m.register_forward_pre_hook(enter, with_kwargs=True) for m in self.model.modules() if id(m) in self.modules
        ]
        try:
            output = self.model(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        target, source = _target(output)
        if target is None or not seen:
            self.note = "no gradients: no output depends on a parameter that requires one"
            return
        grads = torch.autograd.grad(target, [t for _, t in seen], allow_unused=True)
        self.source = source
        for (name, _), grad in zip(seen, grads, strict=True):
            if grad is not None:
                self._squares[name] = self._squares.get(name, 0.0) + grad.double().square().sum().item()
                self._counts[name] = self._counts.get(name, 0) + grad.numel()


def _target(output: Any) -> tuple[Tensor | None, str]:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss, "loss"
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()]
    if not outputs:
        return None, ""
    generator = torch.Generator().manual_seed(0)
    size = sum(t.numel() for t in outputs)
    parts = [(t.float() * torch.randn(t.shape, generator=generator).to(t.device)).sum() for t in outputs]
    return torch.stack(parts).sum() / math.sqrt(size), "random projection"


@contextmanager
def _same_buffers(model: nn.Module) -> Generator[None, None, None]:
    """Buffers that a training-mode forward updates are put back."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
