"""Which modules behave alike, so that one measurement serves them all."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.identify.probe import has_values

PROJECTIONS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Torch's own classes, exactly, that need no measurement: none of them divides by a statistic."""
_MACHINERY = frozenset(vars(nn.Module()))
"""The attributes that every module has; parameters, buffers and submodules are compared on their own."""
_HOOKS = tuple(name for name in _MACHINERY if name.endswith("_hooks"))


def alike(module: nn.Module) -> Any:
    """What two modules must share to behave alike, up to their parameters' values.

    A single number may decide what a module does, so it is compared by value.
    """
    tensors = [_described(n, t) for n, t in (*module.named_parameters(), *module.named_buffers())]
    parts = [(n, type(m), m.training, repr(_plain(m))) for n, m in module.named_modules()]
    return (*tensors, *parts)


def _described(name: str, tensor: Tensor) -> tuple[Any, ...]:
    held = tensor.reshape(()).item() if tensor.numel() == 1 and has_values(tensor) else None
    return name, tuple(tensor.shape), tensor.dtype, repr(held)


def _plain(module: nn.Module) -> list[tuple[str, Any]]:
    """A module's own attributes: plain values and dataclasses by value, anything else by identity."""
    own = [(k, v) for k, v in vars(module).items() if k not in _MACHINERY or (k in _HOOKS and v)]
    return sorted((k, _value(v)) for k, v in own)


def _value(value: Any) -> Any:
    if isinstance(value, int | float | bool | str | type(None) | torch.dtype | torch.device) or is_dataclass(value):
        return repr(value)
    if isinstance(value, tuple | list):
        return repr([_value(v) for v in value])
    return f"{type(value).__name__} {id(value)}"
