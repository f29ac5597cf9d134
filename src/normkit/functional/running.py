"""Running statistics: what a batch adds to them. Every norm of the package that keeps some moves them here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normkit import ops
from normkit.functional.evaluate import kernels_take
from normkit.reference import Statistics
from normkit.spec import NormSpec


class Moments(NamedTuple):
    """A batch's statistics per channel, as running statistics accumulate them."""

    mean: Tensor
    """``[C]``."""
    var: Tensor
    """``[C]``, unbiased (the sum of squares over count - 1), as torch accumulates it."""
    counts: Tensor | bool
    """Whether there was anything to measure."""


def moments(found: Statistics, spec: NormSpec, ndim: int) -> Moments:
    """Per-channel moments of a batch from the statistics that normalized it.

    Instance statistics are averaged over the samples (those that have valid positions). The variance of a single
    value is taken as it was found, 0.
    """
    assert isinstance(spec.channel_dim, int)
    count = found.count
    if isinstance(count, Tensor):
        n = count.to(found.square.dtype)  # a quotient of integers would be float32
        var = found.square * (divisor_of(spec, n) / (n - 1).clamp_min(1))
        held = (count > 0).expand(found.square.shape)
    else:
        var = found.square * (divisor_of(spec, count) / max(count - 1, 1))
        held = None
    channel = spec.channel_dim % ndim
    mean, var = (_per_channel(t.expand(found.square.shape), channel, held) for t in (found.mean, var))
    return Moments(mean, var, count > 0 if held is None else held.any())  # type: ignore[arg-type]


def divisor_of(spec: NormSpec, count: Tensor | int) -> Tensor | int:
    """By what the spec divided its sum of squares."""
    if spec.statistic == "sum":
        return 1
    if spec.statistic == "mean_square":
        return count
    return (count - 1).clamp_min(1) if isinstance(count, Tensor) else max(count - 1, 1)


def _per_channel(value: Tensor, channel: int, held: Tensor | None) -> Tensor:
    """Average over everything but the channel."""
    rows = value.movedim(channel, 0).flatten(1)  # (C, samples)
    if rows.shape[1] == 1:
        return rows[:, 0]
    if held is None:
        return rows.mean(1)
    kept = held.movedim(channel, 0).flatten(1)
    return torch.where(kept, rows, 0).sum(1) / kept.sum(1).clamp_min(1)


def advance_in_place(
    running_mean: Tensor, running_var: Tensor, found: Statistics, spec: NormSpec, step: float | Tensor
) -> bool:
    """Whether one operator moved both, as `advance` would have: for statistics that a kernel measured over a batch."""
    if spec.axes != "batch" or torch.compiler.is_compiling() or isinstance(step, Tensor):
        return False
    mean, var, count = found
    if mean.dtype != torch.float64 or var.dtype != torch.float64:
        return False
    if not isinstance(count, Tensor):
        count = torch.scalar_tensor(count, dtype=torch.float64)
    elif count.dtype != torch.float64:
        return False
    held = running_mean.shape == running_var.shape and running_mean.is_contiguous() and running_var.is_contiguous()
    if not held or not kernels_take(running_mean, running_var, mean, var, count):
        return False
    if mean.numel() != running_mean.numel():
        return False
    ops.update_running(running_mean, running_var, mean.flatten(), var.flatten(), count.flatten(), float(step))
    return True


def advance(
    running_mean: Tensor, running_var: Tensor, batch: Moments, step: float | Tensor, *, skip_nonfinite: bool = False
) -> tuple[Tensor, Tensor, Tensor | bool]:
    """``running + step * (batch - running)``, out of place.

    Args:
        running_mean: ``[C]``.
        running_var: ``[C]``.
        batch: what was measured.
        step: the momentum; 1 / number of batches for a plain average.
        skip_nonfinite: leave both as they are when any channel of the batch is not finite.

    Returns:
        The new mean, the new variance, and whether the batch counted: an empty batch does not, nor one that is
        masked throughout, nor one that was skipped.
    """
    counted = batch.counts
    if skip_nonfinite:
        counted = torch.isfinite(batch.mean).all() & torch.isfinite(batch.var).all() & counted
    new = []
    for running, value in ((running_mean, batch.mean), (running_var, batch.var)):
        compute = torch.promote_types(running.dtype, torch.float32)
        old, value = running.to(compute), value.to(compute)
        moved = ((1 - step) * old + step * value).to(running.dtype)
        if isinstance(counted, Tensor):
            moved = torch.where(counted, moved, running)
        new.append(moved if counted is not False else running)
    return new[0], new[1], counted
