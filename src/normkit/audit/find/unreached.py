"""Norms that a run never reached: modules that behave as one, of which no operator ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from normkit.audit.find.operators import VIEWS, packet
from normkit.audit.identify import Identification, identify
from normkit.audit.identify.alike import PROJECTIONS, alike
from normkit.audit.identify.probe import tensors_of
from normkit.audit.trace.graph import Trace
from normkit.audit.trace.wrappers import class_name, plain_modules, plain_submodule

_VIEWS = VIEWS | {"split", "split_with_sizes", "slice", "select", "detach", "as_strided"}
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
    read = _read(trace)
    known: dict[Any, Identification] = {}
    found: list[Unreached] = []
    for name, module in plain_modules(model):
        own = {n: t for n, t, _, _ in tensors_of(module)}
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


def _read(trace: Trace) -> set[str]:
    """The names of the tensors that something is computed from; a view that nothing reads is no use of its base."""
    used = set(trace.outputs)
    for node in reversed(trace.nodes):
        if packet(node) not in _VIEWS or any(value in used for value in node.outputs):
            used.update(node.inputs)
    return {trace.values[value].name for value in used}


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
