"""Row operators: RMSNorm and LayerNorm over the last dim, plain, after a residual sum, and gated.

Shapes: x ``(..., D)``; weight and bias ``(D,)``, or the shape of x's last dims (a gain for each head).
``weight_offset`` is added to the stored weight, in float32 or (``gain_in_input``) in the weight's own dtype. With
``round_before_gain`` the normalized value is rounded to half precision before the gain multiplies it. ``dtype`` is the
output's (x's own by default). Leading dims may have any strides: a slice of a fused projection is read where it lies.

What the kernels do not take (see `autograd` for when that is) runs on the plain form, which also words the errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.ops import autograd, fused
from normkit.ops import references as ref
from normkit.ops.autograd import native, needs_grad
from normkit.ops.extension import LOADED

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32, torch.float64)
_compiling = torch.compiler.is_compiling

if LOADED:
    _rms_norm = torch.ops.normkit.rms_norm.default
    _layer_norm = torch.ops.normkit.layer_norm.default
    _add_rms_norm = torch.ops.normkit.add_rms_norm.default
    _add_layer_norm = torch.ops.normkit.add_layer_norm.default
    _gated_rms_norm = torch.ops.normkit.gated_rms_norm.default


def _fits(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype | None) -> bool:
    """What the operator itself would check, asked beforehand where a fake tensor runs instead of the operator."""
    out = x.dtype if dtype is None else dtype
    if (
        x.dtype not in _FLOATS
        or out not in _FLOATS
        or x.dim() < 1
        or (x.dtype == torch.float64) != (out == torch.float64)
    ):
        return False
    first = weight if weight is not None else bias
    if first is None:
        return True
    n = first.dim()
    fits = 1 <= n <= x.dim() and first.shape == x.shape[-n:] and first.is_cpu and first.dtype in _FLOATS
    return fits and (bias is None or (bias.shape == first.shape and bias.is_cpu and bias.dtype in _FLOATS))


def _rounds_oddly(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype | None, stream: torch.dtype) -> bool:
    """Roundings before the gain that no kernel has: with a bias after it, or to a type that is not the output's."""
    if bias is not None:
        return True
    if dtype is None or dtype == stream or dtype not in _HALF:
        return False
    return stream in _HALF or weight is None or weight.dtype != dtype


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    gain_in_input: bool = False,
    round_before_gain: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight_offset + weight) + bias`` over the last dim."""
    args = (x, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype)
    if not native(x):
        y = fused.row_norm(False, x, weight, bias, eps, weight_offset, round_before_gain, dtype)
        return ref.rms_norm_reference(*args) if y is None else y
    if round_before_gain and _rounds_oddly(weight, bias, dtype, x.dtype):
        return ref.rms_norm_reference(*args)
    needs = needs_grad(x, weight, bias)
    if _compiling():
        if not _fits(x, weight, bias, dtype):
            return ref.rms_norm_reference(*args)
        return torch.ops.normkit.rms_norm_with_statistics(*args)[0] if needs else torch.ops.normkit.rms_norm(*args)
    try:
        return autograd.rms_norm_function(*args) if needs else _rms_norm(*args)
    except RuntimeError:
        return ref.rms_norm_reference(*args)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    gain_in_input: bool = False,
    round_before_gain: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias`` over the last dim."""
    args = (x, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype)
    if not native(x):
        y = fused.row_norm(True, x, weight, bias, eps, weight_offset, round_before_gain, dtype)
        return ref.layer_norm_reference(*args) if y is None else y
    if round_before_gain and _rounds_oddly(weight, bias, dtype, x.dtype):
        return ref.layer_norm_reference(*args)
    needs = needs_grad(x, weight, bias)
    if _compiling():
        if not _fits(x, weight, bias, dtype):
            return ref.layer_norm_reference(*args)
        return torch.ops.normkit.layer_norm_with_statistics(*args)[0] if needs else torch.ops.normkit.layer_norm(*args)
    try:
        return autograd.layer_norm_function(*args) if needs else _layer_norm(*args)
    except RuntimeError:
        return ref.layer_norm_reference(*args)


def _add_norm(
    centered: bool,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    gain_in_input: bool,
    round_before_gain: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    # A float32 stream rounds nothing before the gain.
    rounds = round_before_gain and (residual.dtype in _HALF or (dtype or x.dtype) != x.dtype)
    args = (x, residual, weight, bias, eps, weight_offset, gain_in_input, rounds, dtype)
    plain = ref.add_layer_norm_reference if centered else ref.add_rms_norm_reference
    if not native(x) or (rounds and _rounds_oddly(weight, bias, dtype or x.dtype, residual.dtype)):
        return plain(*args)
    needs = needs_grad(x, residual, weight, bias)
    if _compiling():
        widths = residual.dtype in (x.dtype, torch.float32) and (x.dtype == torch.float64) == (
            residual.dtype == torch.float64
        )
        if not (_fits(x, weight, bias, dtype) and widths and residual.shape == x.shape):
            return plain(*args)
        ops = torch.ops.normkit
        if needs:
            saving = ops.add_layer_norm_with_statistics if centered else ops.add_rms_norm_with_statistics
            return tuple(saving(*args)[:2])  # type: ignore[return-value]
        return (ops.add_layer_norm if centered else ops.add_rms_norm)(*args)
    try:
        if needs:
            return (autograd.add_layer_norm_function if centered else autograd.add_rms_norm_function)(*args)
        return (_add_layer_norm if centered else _add_rms_norm)(*args)
    except RuntimeError:
        return plain(*args)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    gain_in_input: bool = False,
    round_before_gain: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(`rms_norm` of ``x + residual``, the sum); the sum is rounded to the residual's dtype before the statistic."""
    return _add_norm(False, x, residual, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    gain_in_input: bool = False,
    round_before_gain: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(`layer_norm` of ``x + residual``, the sum); the sum is rounded to the residual's dtype before the statistic."""
    return _add_norm(True, x, residual, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    gain_in_input: bool = False,
    round_before_gain: bool = False,
    silu: bool = True,
    gate_before: bool = False,
) -> Tensor:
    """`rms_norm` of ``x * act(gate)`` (``gate_before``), or of x, times ``act(gate)``; act is SiLU or sigmoid.

    For features in groups, unflatten x, gate and weight to ``(..., groups, D / groups)``.
    """
    args = (x, gate, weight, eps, weight_offset, gain_in_input, round_before_gain, silu, gate_before)
    if not native(x):
        return ref.gated_rms_norm_reference(*args)
    needs = needs_grad(x, gate, weight)
    if _compiling():
        if not (_fits(x, weight, None, None) and gate.shape == x.shape and gate.dtype == x.dtype):
            return ref.gated_rms_norm_reference(*args)
        ops = torch.ops.normkit
        return ops.gated_rms_norm_with_statistics(*args)[0] if needs else ops.gated_rms_norm(*args)
    try:
        return autograd.gated_rms_norm_function(*args) if needs else _gated_rms_norm(*args)
    except RuntimeError:
        return ref.gated_rms_norm_reference(*args)
