"""What the module files share: argument checks and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checks import check_count as count
from normkit.checks import check_dtype
from normkit.checks import check_number as number

__all__ = ["Device", "count", "empty", "fill", "load_uncounted", "move", "number", "recomputing"]

Device = torch.device | str | None


def empty(shape: Sequence[int], device: Device, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter for reset_parameters to fill."""
    check_dtype(dtype)
    return nn.Parameter(torch.empty(tuple(shape), device=device, dtype=dtype))


def fill(parameter: nn.Parameter | Tensor | None, value: float) -> None:
    """Set every entry, where there is a parameter."""
    if parameter is not None:
        nn.init.constant_(parameter, value)


def move(buffer: Tensor, value: Tensor, share: Tensor) -> None:
    """``(1 - share) * buffer + share * value``, one value a channel; the share is a tensor of the statistics' dtype.

    (Not as a difference: a buffer that is infinite would become NaN.)
    """
    moved = (1 - share) * buffer.to(share.dtype) + share * value.reshape(-1)
    buffer.copy_(torch.where(share == 0, buffer, moved.to(buffer.dtype)))


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing repeating one that already counted."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def load_uncounted(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """As torch's batch norms: a checkpoint from before ``num_batches_tracked`` loads, and leaves the count alone."""
    counted = module.num_batches_tracked
    if isinstance(counted, Tensor) and f"{prefix}running_mean" in state:
        state.setdefault(f"{prefix}num_batches_tracked", torch.tensor(0) if counted.is_meta else counted)
