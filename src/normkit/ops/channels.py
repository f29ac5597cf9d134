"""Channel operators: GroupNorm, InstanceNorm, BatchNorm, and LayerNorm over dim 1.

Shapes: x ``(N, C, ...)``, contiguous or channels-last, and the output in the same layout; weight and bias ``(C,)``.
What the kernels do not take runs on the plain form, which also words the errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.ops import autograd, fused
from normkit.ops import references as ref
from normkit.ops.autograd import native, needs_grad
from normkit.ops.extension import LOADED
from normkit.ops.rows import layer_norm

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_compiling = torch.compiler.is_compiling

if LOADED:
    _group_norm = torch.ops.normkit.group_norm.default
    _batch_norm_train = torch.ops.normkit.batch_norm_train.default
    _batch_norm = torch.ops.normkit.batch_norm.default
    _update_running = torch.ops.normkit.update_running.default
    _channel_layer_norm = torch.ops.normkit.channel_layer_norm.default


def _fits(x: Tensor, *parameters: Tensor | None) -> bool:
    if x.dtype not in _FLOATS or x.dim() < 2:
        return False
    return all(p is None or (p.shape == x.shape[1:2] and p.is_cpu and p.dtype in _FLOATS) for p in parameters)


def _mask_fits(x: Tensor, mask: Tensor | None) -> bool:
    return mask is None or (mask.dtype == torch.bool and mask.shape == x.shape[:1] + x.shape[2:] and mask.is_cpu)


def group_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, groups: int = 1, eps: float = 1e-5
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over space and a group of channels, per sample."""
    args = (x, weight, bias, groups, eps)
    if not native(x):
        y = None if x.is_cpu else fused.group_norm(*args)
        return ref.group_norm_reference(*args) if y is None else y
    needs = needs_grad(x, weight, bias)
    if _compiling():
        if not _fits(x, weight, bias) or groups < 1 or x.shape[1] % groups:
            return ref.group_norm_reference(*args)
        ops = torch.ops.normkit
        return ops.group_norm_with_statistics(*args)[0] if needs else ops.group_norm(*args)
    try:
        return autograd.group_norm_function(*args) if needs else _group_norm(*args)
    except RuntimeError:
        return ref.group_norm_reference(*args)


def group_norm_with_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`group_norm` with the mean and the variance (divided by n) of each sample and group, in float64.

    None for arguments that the operator does not take.
    """
    args = (x, weight, bias, groups, eps)
    if _compiling():
        return torch.ops.normkit.group_norm_with_statistics(*args) if _fits(x, weight, bias) else None
    try:
        if needs_grad(x, weight, bias):
            return autograd.group_norm_with_statistics_function(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.normkit.group_norm_with_statistics(*args)
    except RuntimeError:
        return None


def instance_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over space, per sample and channel."""
    return group_norm(x, weight, bias, max(1, x.shape[1]) if x.dim() > 1 else 1, eps)


def batch_norm_train(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize each channel by the batch's own statistics; update nothing.

    Args:
        x: ``(N, C, ...)``.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        mask: ``(N, ...)``, True at valid positions: others do not count and give zero.
        eps: added to the variance.

    Returns:
        (y, mean, variance, count): the statistics in float64, the variance divided by n, all without gradient;
        `update_running` takes them.
    """
    args = (x, weight, bias, mask, eps)
    if not native(x) or not _mask_fits(x, mask):
        return ref.batch_norm_train_reference(*args)
    if mask is not None and not mask.is_contiguous():
        args = (x, weight, bias, mask.contiguous(), eps)
    needs = needs_grad(x, weight, bias)
    if _compiling():
        if not _fits(x, weight, bias):
            return ref.batch_norm_train_reference(*args)
        return torch.ops.normkit.batch_norm_train(*args)
    try:
        if needs:
            return autograd.batch_norm_train_function(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return _batch_norm_train(*args)
    except RuntimeError:
        return ref.batch_norm_train_reference(*args)


def update_running(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, count: Tensor, momentum: float
) -> None:
    """``running = (1 - momentum) * running + momentum * batch``, in place, with the unbiased variance.

    A batch without elements changes nothing.
    """
    if native(running_mean):
        (torch.ops.normkit.update_running if _compiling() else _update_running)(
            running_mean, running_var, mean, variance, count, momentum
        )
        if not _compiling():  # a stable-ABI operator does not do it
            torch.autograd.graph.increment_version((running_mean, running_var))
        return
    with torch.no_grad():
        some = count > 0
        unbiased = variance * (count / (count - 1).clamp_min(1))
        for running, batch in ((running_mean, mean), (running_var, unbiased)):
            blended = running.lerp(batch.to(running.dtype), momentum)
            running.copy_(torch.where(some, blended, running))


def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` with given statistics of each channel."""
    args = (x, mean, variance, weight, bias, mask, eps)
    if not native(x) or not _mask_fits(x, mask) or needs_grad(mean, variance):
        return ref.batch_norm_reference(*args)
    if mask is not None and not mask.is_contiguous():
        args = (x, mean, variance, weight, bias, mask.contiguous(), eps)
    needs = needs_grad(x, weight, bias)
    if _compiling():
        if not _fits(x, mean, variance, weight, bias):
            return ref.batch_norm_reference(*args)
        return (torch.ops.normkit.batch_norm_frozen if needs else torch.ops.normkit.batch_norm)(*args)
    if needs:  # running statistics may move before the backward, which must not see it
        args = (x, mean.clone(), variance.clone(), weight, bias, args[5], eps)
    try:
        return autograd.batch_norm_frozen_function(*args) if needs else _batch_norm(*args)
    except RuntimeError:
        return ref.batch_norm_reference(*args)


def channel_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`layer_norm` over dim 1 of ``(N, C, ...)`` without a permute."""
    args = (x, weight, bias, eps)
    if not native(x) or x.dim() < 2:
        return ref.channel_layer_norm_reference(*args)
    if not x.is_contiguous():
        rows = x.movedim(1, -1)
        if rows.is_contiguous():  # channels-last: rows of features already
            return layer_norm(rows, weight, bias, eps).movedim(-1, 1)
    needs = needs_grad(x, weight, bias)
    if _compiling():
        if not _fits(x, weight, bias):
            return ref.channel_layer_norm_reference(*args)
        ops = torch.ops.normkit
        return ops.channel_layer_norm_with_statistics(*args)[0] if needs else ops.channel_layer_norm(*args)
    try:
        return autograd.channel_layer_norm_function(*args) if needs else _channel_layer_norm(*args)
    except RuntimeError:
        return ref.channel_layer_norm_reference(*args)
