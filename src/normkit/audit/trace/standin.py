"""Going on past a module that raises: the run is repeated with something in its place.

What stands in is an opaque map of the module's first float input, laid out like the result of another call of a module
of the same class, so that what lies behind can still be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normkit.audit.trace.graph import ModuleCall, Opaque, TensorInfo, Trace, flat_tensors
from normkit.audit.trace.recorder import trace
from normkit.audit.trace.wrappers import plain_submodule

_TRIES = 8


def trace_past_failures(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """`trace`, repeated with stand-ins for the modules that raise, as long as each repetition gets further.

    Nothing stands in where the model's own forward raises, or before anything was normalized: then the inputs are
    wrong, not one module. Failures of modules that something stood in for are kept in `Trace.failures`.
    """
    recorded = trace(model, args, kwargs)
    first = recorded
    absent: dict[str, Callable[..., Any]] = {}
    failures = list(recorded.failures)
    for _ in range(_TRIES):
        raised = next((f for f in recorded.failures if f.error is recorded.error), None)
        if raised is None or raised.module in ("", *absent) or not _has_statistic(recorded):
            break
        call = next((c for c in reversed(recorded.calls) if c.name == raised.module and c.failed), None)
        if call is None or not _floats(call):
            break
        absent[raised.module] = _stand_in(_template(recorded, call))
        with _replaced(model, absent):
            again = trace(model, args, kwargs)
        if again.error is not None and len(again.nodes) <= len(recorded.nodes):
            break
        recorded = again
        failures += again.failures
    recorded.failures[:] = failures if recorded is not first else recorded.failures
    return recorded


def _has_statistic(recorded: Trace) -> bool:
    """Whether anything like a norm ran: an operator that normalizes, or takes a reciprocal root."""
    return any("norm" in node.name or "rsqrt" in node.name or "var" in node.name for node in recorded.nodes)


def _floats(call: ModuleCall) -> list[TensorInfo]:
    found: list[TensorInfo] = []
    tree_map_only(TensorInfo, found.append, (call.args, call.kwargs))
    return [info for info in found if info.dtype.is_floating_point]


def _template(recorded: Trace, call: ModuleCall) -> Any:
    """The result of another call of the same class, as TensorInfo; the shape of the input where there is none."""
    alike = (c for c in recorded.calls if type(c.module) is type(call.module) and c.outputs and not c.failed)
    other = next(alike, None)
    return _floats(call)[0] if other is None else other.result


def _stand_in(template: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = next(t for t in flat_tensors([*args, *kwargs.values()]) if t.is_floating_point())
        mapped = torch.bmm(x.reshape(1, -1, 1), x.new_ones(1, 1, 1)).reshape(x.shape)

        def made(info: TensorInfo) -> Tensor:
            return mapped if info.shape == tuple(x.shape) else x.new_zeros(info.shape, dtype=info.dtype)

        return tree_map_only(Opaque, lambda _: None, tree_map_only(TensorInfo, made, template))

    return forward


@contextmanager
def _replaced(model: nn.Module, absent: Mapping[str, Callable[..., Any]]) -> Generator[None, None, None]:
    """The modules' forwards exchanged for the length of a run."""
    modules = {name: plain_submodule(model, name) for name in absent}
    before = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        vars(module)["forward"] = absent[name]
    try:
        yield
    finally:
        for name, module in modules.items():
            vars(module).pop("forward", None)
            if before[name] is not None:
                vars(module)["forward"] = before[name]
