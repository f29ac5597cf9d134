"""Forms that write into given tensors: no allocation, no gradient, any of the operator's inputs as the output.

``x_out(..., out=)`` takes the arguments of ``x`` (but ``dtype``: the output's own counts) and returns ``out``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.ops import references as ref
from normkit.ops.autograd import native

_bump: Callable[[Tensor], None] = torch.autograd.graph.increment_version
_compiling = torch.compiler.is_compiling


def _defaults(plain: Callable[..., Any]) -> tuple[Any, ...]:
    """The plain form's default arguments, by position."""
    return tuple(p.default for p in inspect.signature(plain).parameters.values() if p.name != "dtype")


def _make_out(name: str, plain: Callable[..., Any], *outputs: str) -> Callable[..., Any]:
    operator = f"{name}_out"
    defaults = _defaults(plain)
    takes_dtype = "dtype" in inspect.signature(plain).parameters

    def write(*args: Any, **given: Tensor) -> Any:
        if set(given) != set(outputs):
            raise TypeError(f"{operator} takes {', '.join(f'{o}=' for o in outputs)} by keyword; got {sorted(given)}")
        targets = [given[o] for o in outputs]
        args += defaults[len(args) :]
        with torch.no_grad():
            done = False
            if native(args[0]):
                try:
                    getattr(torch.ops.normkit, operator).default(*args, *targets)
                    done = True
                except RuntimeError:
                    if _compiling():
                        raise
            if not done:
                results = plain(*args, targets[0].dtype) if takes_dtype else plain(*args)
                for target, result in zip(targets, results if isinstance(results, tuple) else (results,), strict=True):
                    if target.shape != result.shape:
                        raise ValueError(f"out has shape {tuple(target.shape)}; the result has {tuple(result.shape)}")
                    target.copy_(result)
            elif not _compiling():
                for target in targets:
                    _bump(target)  # a stable-ABI operator does not do it
        return targets[0] if len(targets) == 1 else tuple(targets)

    write.__name__ = write.__qualname__ = operator
    write.__doc__ = f"`{name}` into {' and '.join(f'``{o}``' for o in outputs)}."
    return write


rms_norm_out = _make_out("rms_norm", ref.rms_norm_reference, "out")
layer_norm_out = _make_out("layer_norm", ref.layer_norm_reference, "out")
add_rms_norm_out = _make_out("add_rms_norm", ref.add_rms_norm_reference, "out", "sum")
add_layer_norm_out = _make_out("add_layer_norm", ref.add_layer_norm_reference, "out", "sum")
gated_rms_norm_out = _make_out("gated_rms_norm", ref.gated_rms_norm_reference, "out")
group_norm_out = _make_out("group_norm", ref.group_norm_reference, "out")
batch_norm_out = _make_out("batch_norm", ref.batch_norm_reference, "out")
batch_norm_train_out = _make_out(
    "batch_norm_train", ref.batch_norm_train_reference, "out", "mean", "variance", "count"
)
channel_layer_norm_out = _make_out("channel_layer_norm", ref.channel_layer_norm_reference, "out")
