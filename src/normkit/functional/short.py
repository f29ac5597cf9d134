"""The shortest ways to the kernels, for ordinary calls: a small tensor costs little more than the call of an operator.

Each function takes the arguments that nearly all calls have and gives None for everything else, where the long way
(`evaluate`) must look: other options, devices and tensor types, compilers, transforms, dispatch modes. It also does so
where the operator refuses its arguments: the long way then words the error.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normkit import ops
from normkit.ops import autograd
from normkit.spec import Gate

_LOADED = ops.LOADED
_compiling = torch.compiler.is_compiling
_functorch = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_EPS32 = torch.finfo(torch.float32).eps
_EPS64 = torch.finfo(torch.float64).eps
_HALF = (torch.float16, torch.bfloat16)
_GATES: dict[Gate, tuple[bool, bool]] = {
    ("silu", "after"): (True, False),
    ("silu", "before"): (True, True),
    ("sigmoid", "after"): (False, False),
    ("sigmoid", "before"): (False, True),
}

if _LOADED:  # `_op` is past one Python frame that serves dispatch modes
    _kernels = torch.ops.normkit
    _layer_norm = _kernels.layer_norm.default._op
    _rms_norm = _kernels.rms_norm.default._op
    _add_layer_norm = _kernels.add_layer_norm.default._op
    _add_rms_norm = _kernels.add_rms_norm.default._op
    _gated_rms_norm = _kernels.gated_rms_norm.default._op
    _group_norm = _kernels.group_norm.default._op
    _batch_norm = _kernels.batch_norm.default._op
    _batch_norm_train = _kernels.batch_norm_train.default._op
    _update_running = _kernels.update_running.default._op
    _channel_layer_norm = _kernels.channel_layer_norm.default._op


def as_torch(weight_offset: float, rounding: str, output_dtype: str, channel_dim: int) -> bool:
    """Whether the options of a norm over channels are those that torch's own has."""
    return weight_offset == 0 and rounding == "after_gain" and output_dtype == "input" and channel_dim == 1


def _ordinary(x: Tensor) -> bool:
    """Whether x is a plain CPU tensor that holds something, and nothing watches what is done to it."""
    return (
        _LOADED
        and not _compiling()
        and type(x) is Tensor
        and x.is_cpu
        and x.numel() > 0
        and not (_modes() or _functorch() or forward_ad._current_level >= 0)
    )


def _elsewhere(t: Tensor | None) -> bool:
    return t is not None and not t.is_cpu


def _recorded(x: Tensor, a: Tensor | None, b: Tensor | None) -> bool:
    return _grad_enabled() and (
        x.requires_grad or (a is not None and a.requires_grad) or (b is not None and b.requires_grad)
    )


def row(
    centered: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    weight_offset: float,
    rounding: str,
) -> Tensor | None:
    """LayerNorm or RMSNorm over the last dim. An eps of None is the machine epsilon of the compute dtype.

    (Written without calls of the functions here: decoding is one row at a time, and each call shows.)
    """
    if (
        not _LOADED
        or _compiling()
        or type(x) is not Tensor
        or weight is None
        or weight.dim() != 1
        or not (weight_offset == 0 or weight_offset == 1)
        or not x.is_cpu
        or not weight.is_cpu
        or (bias is not None and not bias.is_cpu)
        or not x.numel()
        or _modes()
        or _functorch()
        or forward_ad._current_level >= 0
    ):
        return None
    if type(eps) is not float:
        if eps is not None or centered:
            return None
        eps = _EPS64 if x.dtype == torch.float64 else _EPS32
    elif not 0 < eps < inf:
        return None
    before = rounding == "before_gain"
    if bias is not None if before else rounding != "after_gain":  # no kernel rounds before a gain that a bias follows
        return None
    try:
        if _grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
            recorded = autograd.layer_norm_function if centered else autograd.rms_norm_function
            return recorded(x, weight, bias, eps, weight_offset, False, before, None)
        return (_layer_norm if centered else _rms_norm)(x, weight, bias, eps, weight_offset, False, before, None)
    except RuntimeError:
        return None


def _takes(eps: float, weight_offset: float, rounding: str, before: bool, bias: Tensor | None) -> bool:
    return 0 < eps < inf and weight_offset in (0, 1) and (bias is None if before else rounding == "after_gain")


def add_row(
    centered: bool,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    weight_offset: float,
    rounding: str,
) -> tuple[Tensor, Tensor] | None:
    """(LayerNorm or RMSNorm of ``x + residual`` over the last dim, the sum)."""
    if weight is None or weight.dim() != 1 or not _ordinary(x) or not weight.is_cpu or _elsewhere(bias):
        return None
    if type(residual) is not Tensor or not residual.is_cpu or type(eps) is not float or residual.shape != x.shape:
        return None
    wider = residual.dtype != x.dtype
    if wider and not (residual.dtype == torch.float32 and x.dtype in _HALF):
        return None
    before = rounding == "before_gain"
    if not _takes(eps, weight_offset, rounding, before, bias):
        return None
    rounds = before and residual.dtype in _HALF  # a float32 stream rounds nothing before the gain
    try:
        if _recorded(x, weight, bias) or (residual.requires_grad and _grad_enabled()):
            recorded = autograd.add_layer_norm_function if centered else autograd.add_rms_norm_function
            return recorded(x, residual, weight, bias, eps, weight_offset, False, rounds, None)
        add = _add_layer_norm if centered else _add_rms_norm
        return add(x, residual, weight, bias, eps, weight_offset, False, rounds, None)
    except RuntimeError:
        return None


def gated_row(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float | None, weight_offset: float, rounding: str, kind: Gate
) -> Tensor | None:
    """RMSNorm over the last dim with a gate of x's shape and dtype."""
    if weight is None or weight.dim() != 1 or not _ordinary(x) or not weight.is_cpu:
        return None
    if type(gate) is not Tensor or not gate.is_cpu or type(eps) is not float or gate.dtype != x.dtype:
        return None
    before = rounding == "before_gain"
    if type(kind) is not tuple or kind not in _GATES or not _takes(eps, weight_offset, rounding, before, None):
        return None
    silu, gate_before = _GATES[kind]
    try:
        if _recorded(x, weight, gate):
            return autograd.gated_rms_norm_function(
                x, gate, weight, eps, weight_offset, False, before, silu, gate_before
            )
        return _gated_rms_norm(x, gate, weight, eps, weight_offset, False, before, silu, gate_before)
    except RuntimeError:
        return None


def channel_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """LayerNorm over dim 1 of ``(N, C, ...)``."""
    if not _ordinary(x) or x.dim() < 2 or _elsewhere(weight) or _elsewhere(bias) or type(eps) is not float:
        return None
    if not 0 < eps < inf:
        return None
    if not x.is_contiguous():
        rows = x.movedim(1, -1)
        y = row(True, rows, weight, bias, eps, 0.0, "after_gain") if rows.is_contiguous() else None
        return None if y is None else y.movedim(-1, 1)
    try:
        if _recorded(x, weight, bias):
            return autograd.channel_layer_norm_function(x, weight, bias, eps)
        return _channel_layer_norm(x, weight, bias, eps)
    except RuntimeError:
        return None


def group(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor | None:
    """GroupNorm of ``(N, C, ...)``."""
    if not _ordinary(x) or _elsewhere(weight) or _elsewhere(bias):
        return None
    if type(groups) is not int or groups < 1 or type(eps) is not float or not 0 < eps < inf:
        return None
    try:
        if _recorded(x, weight, bias):
            return autograd.group_norm_function(x, weight, bias, groups, eps)
        return _group_norm(x, weight, bias, groups, eps)
    except RuntimeError:
        return None


def instance(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """InstanceNorm of ``(N, C, ...)`` with more than one position."""
    if not isinstance(x, Tensor) or x.dim() < 3:
        return None
    n, channels = x.shape[:2]
    return group(x, weight, bias, channels, eps) if x.numel() != n * channels else None


def batch(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor | None:
    """BatchNorm of ``(N, C, ...)`` by given statistics."""
    if mean is None or variance is None or not mean.is_cpu or not variance.is_cpu:
        return None
    if not _ordinary(x) or _elsewhere(weight) or _elsewhere(bias) or type(eps) is not float or not 0 < eps < inf:
        return None
    if type(mean) is not Tensor or type(variance) is not Tensor or mean.requires_grad or variance.requires_grad:
        return None
    try:
        if _recorded(x, weight, bias):  # running statistics may move before the backward, which must not see it
            return autograd.batch_norm_frozen_function(x, mean.clone(), variance.clone(), weight, bias, None, eps)
        return _batch_norm(x, mean, variance, weight, bias, None, eps)
    except RuntimeError:
        return None


def batch_train(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
) -> Tensor | None:
    """BatchNorm of ``(N, C, ...)`` by its own statistics, which move the running ones (both or neither given)."""
    if not _ordinary(x) or _elsewhere(weight) or _elsewhere(bias) or type(eps) is not float or not 0 < eps < inf:
        return None
    if x.dim() < 2 or x.numel() == x.shape[1]:  # one value a channel: an error, or a module's choice
        return None
    if running_mean is not None or running_var is not None:
        if not (_may_move(running_mean, x) and _may_move(running_var, x)):
            return None
        if type(momentum) is not float or not 0 <= momentum <= 1:
            return None
    try:
        if _recorded(x, weight, bias):
            y, *measured = autograd.batch_norm_train_function(x, weight, bias, None, eps)
        else:
            with _BelowAutograd():  # the operator has a registered gradient, which costs even where none is wanted
                y, *measured = _batch_norm_train(x, weight, bias, None, eps)
    except RuntimeError:
        return None
    if running_mean is not None and running_var is not None:
        _update_running(running_mean, running_var, *measured, momentum)
        torch.autograd.graph.increment_version((running_mean, running_var))  # a stable-ABI operator does not do it
    return y


def _may_move(running: Tensor | None, x: Tensor) -> bool:
    return (
        running is not None
        and type(running) is Tensor
        and running.is_cpu
        and running.dtype in (torch.float32, torch.float64, *_HALF)
        and running.shape == x.shape[1:2]
        and running.is_contiguous()
    )
