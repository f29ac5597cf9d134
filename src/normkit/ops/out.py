"""Forms that write into given tensors: no allocation, no gradient, any of the operator's inputs as the output.

``x_out(..., out=)`` takes the arguments of ``x`` (but ``dtype``: the output's own counts) and returns ``out``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from normkit.ops import channels, rows
from normkit.ops.autograd import native
from normkit.ops.extension import LOADED

_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_bump: Callable[[Iterable[Tensor]], None] = torch.autograd.graph.increment_version  # type: ignore[assignment]
_compiling = torch.compiler.is_compiling


def _make_out(entry: Callable[..., Any], *outputs: str) -> Callable[..., Any]:
    name = entry.__name__
    operator = f"{name}_out"
    parameters = inspect.signature(entry).parameters
    defaults = tuple(p.default for p in parameters.values() if p.name != "dtype")
    takes_dtype = "dtype" in parameters

    kernel = getattr(torch.ops.normkit, operator).default._op if LOADED else None
    wanted = frozenset(outputs)

    def write(*args: Any, **given: Tensor) -> Any:
        if given.keys() != wanted:
            raise TypeError(f"{operator} takes {', '.join(f'{o}=' for o in outputs)} by keyword; got {sorted(given)}")
        targets = tuple(given[o] for o in outputs)
        args += defaults[len(args) :]
        if kernel is not None and native(args[0]):
            try:
                if _compiling():
                    getattr(torch.ops.normkit, operator).default(*args, *targets)
                else:
                    with _BelowAutograd():  # nothing is recorded; cheaper than no_grad
                        kernel(*args, *targets)
                    _bump(targets)  # a stable-ABI operator does not do it
                return targets[0] if len(targets) == 1 else targets
            except RuntimeError:
                if _compiling():
                    raise
        with torch.no_grad():
            results = entry(*args, targets[0].dtype) if takes_dtype else entry(*args)
            for target, result in zip(targets, results if isinstance(results, tuple) else (results,), strict=True):
                if target.shape != result.shape:
                    raise ValueError(f"out has shape {tuple(target.shape)}; the result has {tuple(result.shape)}")
                target.copy_(result)
        return targets[0] if len(targets) == 1 else targets

    write.__name__ = write.__qualname__ = operator
    write.__doc__ = f"`{name}` into {' and '.join(f'``{o}``' for o in outputs)}."
    return write


rms_norm_out = _make_out(rows.rms_norm, "out")
layer_norm_out = _make_out(rows.layer_norm, "out")
add_rms_norm_out = _make_out(rows.add_rms_norm, "out", "sum")
add_layer_norm_out = _make_out(rows.add_layer_norm, "out", "sum")
gated_rms_norm_out = _make_out(rows.gated_rms_norm, "out")
group_norm_out = _make_out(channels.group_norm, "out")
batch_norm_out = _make_out(channels.batch_norm, "out")
batch_norm_train_out = _make_out(channels.batch_norm_train, "out", "mean", "variance", "count")
_contiguous_channel_layer_norm_out = _make_out(channels.channel_layer_norm, "out")


def channel_layer_norm_out(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, out: Tensor
) -> Tensor:
    """`channel_layer_norm` into ``out``."""
    if not x.is_contiguous() and x.dim() > 1 and out.dim() == x.dim():
        rows, target = x.movedim(1, -1), out.movedim(1, -1)
        if rows.is_contiguous() and target.is_contiguous():  # channels-last: rows of features already
            layer_norm_out(rows, weight, bias, eps, out=target)
            return out
    return _contiguous_channel_layer_norm_out(x, weight, bias, eps, out=out)
