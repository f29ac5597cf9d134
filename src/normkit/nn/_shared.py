"""What the module files share: argument checks and parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

Device = torch.device | str | None


def count(name: str, value: object, *, least: int = 1) -> int:
    """An integer argument, checked."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer; got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return value


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite float argument in [low, high], checked."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {type(value).__name__} {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be finite and in [{low}, {high}]; got {value!r}")
    return float(value)


def empty(shape: Sequence[int], device: Device, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter for reset_parameters to fill."""
    return nn.Parameter(torch.empty(tuple(shape), device=device, dtype=dtype))


def fill(parameter: nn.Parameter | Tensor | None, value: float) -> None:
    """Set every entry, where there is a parameter."""
    if parameter is not None:
        nn.init.constant_(parameter, value)


def move(buffer: Tensor, value: Tensor, share: Tensor) -> None:
    """``buffer += share * (value - buffer)``, one value a channel; the share is a tensor of the statistics' dtype."""
    buffer.lerp_(value.reshape(-1).to(buffer.dtype), share.to(buffer.dtype).expand_as(buffer))


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing repeating one that already counted."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
