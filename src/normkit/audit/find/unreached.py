"""Norms that a run never reached: modules that behave as one, of which no operator ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from normkit.audit.identify import Identification, identify
from normkit.audit.identify.alike import PROJECTIONS, alike
from normkit.audit.trace.graph import Trace
from normkit.audit.trace.wrappers import class_name, plain_modules, plain_submodule

_MANY_TENSORS, _LARGE = 6, 2**16
"""A norm holds a gain, a bias, running statistics and a counter at most, none of them a matrix of a projection."""


@dataclass(frozen=True)
class Unreached:
    """A norm that the run did not reach."""

    name: str
    class_name: str
    kind: str
    reason: str
    """Why it did not run."""

    def to_dict(self) -> dict[str, str]:
        """JSON-ready; see `Audit.to_dict`."""
        return {"name": self.name, "class": self.class_name, "kind": self.kind, "reason": self.reason}


def find_unreached(model: nn.Module, trace: Trace) -> tuple[Unreached, ...]:
    """The norm modules that were neither called nor had a tensor of theirs read.

    Identified by behaviour at usual shapes, so a module without parameters, or one that fits no usual shape, is not
    listed.
    """
    called = {id(call.module) for call in trace.calls}
    read = {trace.values[v].name for node in trace.nodes for v in node.inputs}
    known: dict[Any, Identification] = {}
    found: list[Unreached] = []
    for name, module in plain_modules(model):
        own = dict((*module.named_parameters(), *module.named_buffers()))
        if id(module) in called or not 0 < len(own) <= _MANY_TENSORS or any(f"{name}.{n}" in read for n in own):
            continue
        if any(t.numel() > _LARGE for t in own.values()) or any(type(m) in PROJECTIONS for m in module.modules()):
            continue
        if any(name.startswith(f"{other.name}.") for other in found):
            continue
        key = alike(module)
        if key not in known:
            known[key] = identify(module)
        if known[key]:
            found.append(Unreached(name, class_name(module), known[key].kind, _reason(model, name, called, trace)))
    return tuple(found)


def _reason(model: nn.Module, name: str, called: set[int], trace: Trace) -> str:
    """The outermost module around it that was not called either, or what raised before it."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        around = ".".join(parts[:end])
        holder = plain_submodule(model, around)
        if id(holder) not in called and not isinstance(holder, nn.ModuleList | nn.ModuleDict):
            return f"{around} was never called"
    if trace.error is not None:
        return f"the run ended in {type(trace.error).__name__} before it"
    return "it was never called with these inputs"
