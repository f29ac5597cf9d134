"""Every operator of the native library: its fake, and the gradient that compiled and exported graphs use.

The schemas are in csrc/ops/library.cpp, so that an exported model also runs without Python. `OPERATORS` names them all;
a test loops opcheck over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.ops import formulas
from normkit.ops.extension import LOADED

_FLOAT64 = torch.float64


def _compute(x: Tensor) -> torch.dtype:
    return _FLOAT64 if x.dtype == _FLOAT64 else torch.float32


# ---- fakes: shapes, dtypes and strides of the outputs ----


def _rows_output(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def _rstd(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=_compute(x))


def _mean(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=_FLOAT64)


def _row_norm(x, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype):
    return _rows_output(x, dtype)


def _rms_with_statistics(x, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype):
    return _rows_output(x, dtype), _rstd(x)


def _layer_with_statistics(x, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype):
    return _rows_output(x, dtype), _mean(x), _rstd(x)


def _add(x, residual, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype):
    return _rows_output(x, dtype), residual.new_empty(residual.shape)


def _add_rms_with_statistics(x, residual, *options):
    return *_add(x, residual, *options), _rstd(x)


def _add_layer_with_statistics(x, residual, *options):
    return *_add(x, residual, *options), _mean(x), _rstd(x)


def _nothing(*args):
    return None


def _parameter_grads(x: Tensor, weight: Tensor | None, want_weight: bool, bias_dtype: torch.dtype | None, shape):
    dweight = weight.new_empty(shape) if want_weight and weight is not None else x.new_empty((0,), dtype=torch.float32)
    dbias = x.new_empty((0,), dtype=torch.float32) if bias_dtype is None else x.new_empty(shape, dtype=bias_dtype)
    return dweight, dbias


def _row_shape(x: Tensor, weight: Tensor | None):
    return x.shape[-1:] if weight is None else weight.shape


def _rms_backward(grad, x, weight, rstd, eps, weight_offset, gain_in_input, grad_sum, want_weight, bias_dtype):
    return x.new_empty(x.shape), *_parameter_grads(x, weight, want_weight, bias_dtype, _row_shape(x, weight))


def _layer_backward(grad, x, weight, mean, rstd, eps, weight_offset, gain_in_input, grad_sum, want_weight, bias_dtype):
    return x.new_empty(x.shape), *_parameter_grads(x, weight, want_weight, bias_dtype, _row_shape(x, weight))


def _gated(x, gate, weight, eps, weight_offset, gain_in_input, round_before_gain, silu, gate_before):
    return x.new_empty(x.shape)


def _gated_with_statistics(x, gate, weight, *options):
    return x.new_empty(x.shape), _rstd(x)


def _gated_backward(grad, x, gate, weight, rstd, eps, weight_offset, gain_in_input, silu, gate_before, want_weight):
    dweight, _ = _parameter_grads(x, weight, want_weight, None, _row_shape(x, weight))
    return x.new_empty(x.shape), x.new_empty(x.shape), dweight


def _channels_output(x: Tensor) -> Tensor:
    """Contiguous, or channels-last where x is (and not contiguous as well)."""
    if x.is_contiguous() or not _is_channels_last(x):
        return x.new_empty(x.shape)
    order = [0, *range(2, x.dim()), 1]
    inner = x.new_empty([x.shape[d] for d in order])
    return inner.movedim(-1, 1)


def _is_channels_last(x: Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def _statistics(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=_FLOAT64)


def _group_norm(x, weight, bias, groups, eps):
    return _channels_output(x)


def _group_norm_with_statistics(x, weight, bias, groups, eps):
    return _channels_output(x), _statistics(x, x.shape[0], groups), _statistics(x, x.shape[0], groups)


def _group_norm_backward(grad, x, weight, mean, variance, groups, eps, want_weight, bias_dtype):
    return _channels_output(x), *_parameter_grads(x, weight, want_weight, bias_dtype, x.shape[1:2])


def _batch_norm_train(x, weight, bias, mask, eps):
    c = x.shape[1]
    return _channels_output(x), _statistics(x, c), _statistics(x, c), _statistics(x)


def _batch_norm(x, mean, variance, weight, bias, mask, eps):
    return _channels_output(x)


def _batch_norm_backward(grad, x, weight, mean, variance, count, mask, eps, want_weight, bias_dtype):
    return _channels_output(x), *_parameter_grads(x, weight, want_weight, bias_dtype, x.shape[1:2])


def _channel_layer_norm(x, weight, bias, eps):
    return _channels_output(x)


def _channel_layer_norm_with_statistics(x, weight, bias, eps):
    space = x.shape[2:].numel()
    return _channels_output(x), _statistics(x, x.shape[0], space), _statistics(x, x.shape[0], space)


def _channel_layer_norm_backward(grad, x, weight, mean, rstd, eps, want_weight, bias_dtype):
    return _channels_output(x), *_parameter_grads(x, weight, want_weight, bias_dtype, x.shape[1:2])


OPERATORS: dict[str, Callable[..., Any]] = {
    "rms_norm": _row_norm,
    "rms_norm_with_statistics": _rms_with_statistics,
    "rms_norm_out": _nothing,
    "rms_norm_backward": _rms_backward,
    "layer_norm": _row_norm,
    "layer_norm_with_statistics": _layer_with_statistics,
    "layer_norm_out": _nothing,
    "layer_norm_backward": _layer_backward,
    "add_rms_norm": _add,
    "add_rms_norm_with_statistics": _add_rms_with_statistics,
    "add_rms_norm_out": _nothing,
    "add_rms_norm_inplace": _nothing,
    "add_layer_norm": _add,
    "add_layer_norm_with_statistics": _add_layer_with_statistics,
    "add_layer_norm_out": _nothing,
    "add_layer_norm_inplace": _nothing,
    "gated_rms_norm": _gated,
    "gated_rms_norm_with_statistics": _gated_with_statistics,
    "gated_rms_norm_out": _nothing,
    "gated_rms_norm_backward": _gated_backward,
    "group_norm": _group_norm,
    "group_norm_with_statistics": _group_norm_with_statistics,
    "group_norm_out": _nothing,
    "group_norm_backward": _group_norm_backward,
    "batch_norm_train": _batch_norm_train,
    "batch_norm_train_out": _nothing,
    "batch_norm": _batch_norm,
    "batch_norm_frozen": _batch_norm,
    "batch_norm_out": _nothing,
    "batch_norm_backward": _batch_norm_backward,
    "update_running": _nothing,
    "channel_layer_norm": _channel_layer_norm,
    "channel_layer_norm_with_statistics": _channel_layer_norm_with_statistics,
    "channel_layer_norm_out": _nothing,
    "channel_layer_norm_backward": _channel_layer_norm_backward,
}


def _register() -> None:
    for name, fake in OPERATORS.items():
        torch.library.register_fake(f"normkit::{name}", _on_one_device(fake))
    for name, (setup, backward) in formulas.GRADIENTS.items():
        torch.library.register_autograd(f"normkit::{name}", _unpacking(backward), setup_context=_marking(name, setup))


def _on_one_device(fake: Callable[..., Any]) -> Callable[..., Any]:
    """One parameter on the meta device would let an operator answer with uninitialized memory."""

    def run(*args: Any) -> Any:
        if any(type(a) in (Tensor, torch.nn.Parameter) and not a.is_meta for a in args):
            raise RuntimeError("normkit: all tensors must be on one device; some are on meta")
        return fake(*args)

    return run


def _unpacking(backward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ctx, *grads: backward(ctx, ctx.saved_tensors, *grads)


def _marking(name: str, setup: Callable[..., None]) -> Callable[..., None]:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup(ctx, inputs, output)
        formulas.mark_statistics(ctx, name, output)

    return setup_context


if LOADED:
    _register()
