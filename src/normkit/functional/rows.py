"""layer_norm and rms_norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.checks import check_floating
from normkit.functional import short
from normkit.functional.core import as_shape, make_spec, norm
from normkit.reference import compute_dtype
from normkit.spec import Gate, NormSpec, OutputDtype, Rounding, WeightShape, check_eps


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    rounding: Rounding = "after_gain",
    output_dtype: OutputDtype = "input",
    channel_dim: int = -1,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_kind: Gate = ("silu", "after"),
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Layer normalization (Ba et al. 2016, arXiv:1607.06450).

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias`` over the last ``len(normalized_shape)``
    dims, or over dim ``channel_dim``.

    Args:
        input: ``(*, normalized_shape)``; ``(N, C, ...)`` with ``channel_dim=1``.
        normalized_shape: the feature dims.
        weight: gain, ``normalized_shape`` (or with leading head dims, or one number), or None.
        bias: ``normalized_shape`` or None.
        eps: added to the variance.
        weight_offset: added to the stored gain.
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        output_dtype: ``"input"``, ``"promoted"`` or ``"weight"``; see `normkit.NormSpec`.
        channel_dim: -1, or 1 for channels-first input.
        residual: added first; then ``(y, stream)`` is returned.
        gate: multiplies as ``gate_kind`` says.
        gate_kind: (``"silu"`` or ``"sigmoid"``, ``"before"`` or ``"after"``).
        out: receives the result.

    Returns:
        The result, or ``(y, stream)`` with ``residual``.

    Raises:
        ValueError: a shape, eps or device that does not fit; the message names argument, values and fix.
        TypeError: integer input.

    Differs from `torch.nn.functional.layer_norm`: any pair of input and parameter dtypes; the variance does not lose
    digits for a large mean; a negative eps is refused.
    """
    y: Tensor | tuple[Tensor, Tensor] | None = None
    if out is None and gate is None and output_dtype == "input" and _is_shape_of(weight, normalized_shape):
        if channel_dim == -1 and residual is None:
            y = short.row(True, input, weight, bias, eps, weight_offset, rounding)
        elif channel_dim == -1:
            assert residual is not None
            y = short.add_row(True, input, residual, weight, bias, eps, weight_offset, rounding)
        elif residual is None and short.as_torch(weight_offset, rounding, output_dtype, channel_dim):
            y = short.channel_layer(input, weight, bias, eps)
        if y is not None:
            return y
    spec = make_spec(
        channel_dim=_channel_dim(input, normalized_shape, channel_dim),
        eps=eps,
        has_weight=weight is not None,
        weight_offset=weight_offset if weight is not None else 0.0,
        has_bias=bias is not None,
        weight_shape=_weight_shape(weight, normalized_shape),
        rounding=rounding,
        output_dtype=output_dtype,
        gate=None if gate is None else gate_kind,
    )
    return norm(input, spec, weight, bias, residual=residual, gate=gate, out=out)  # type: ignore[arg-type]


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "after_gain",
    output_dtype: OutputDtype = "input",
    channel_dim: int = -1,
    partial: float = 1.0,
    groups: int = 1,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_kind: Gate = ("silu", "after"),
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Root mean square normalization (Zhang and Sennrich 2019, arXiv:1910.07467).

    ``y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight) + bias``

    Args:
        input: ``(*, normalized_shape)``; ``(N, C, ...)`` with ``channel_dim=1``.
        normalized_shape: the feature dims.
        weight: gain, ``normalized_shape`` (or with leading head dims, or one number), or None.
        eps: added to the mean square; None is the machine epsilon of the compute dtype (float32 for half precision).
        bias: ``normalized_shape`` or None.
        weight_offset: 1.0 where the stored weight is centred on zero (Gemma).
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        output_dtype: ``"input"``, ``"promoted"`` or ``"weight"``; see `normkit.NormSpec`.
        channel_dim: -1, or 1 for channels-first input.
        partial: the leading share of the features that enters the statistic (pRMSNorm).
        groups: the number of equal parts of the features with a statistic each (Mamba 2).
        residual: added first; then ``(y, stream)`` is returned.
        gate: multiplies as ``gate_kind`` says.
        gate_kind: (``"silu"`` or ``"sigmoid"``, ``"before"`` or ``"after"``).
        out: receives the result.

    Returns:
        The result, or ``(y, stream)`` with ``residual``.

    Raises:
        ValueError: a shape, eps or device that does not fit; the message names argument, values and fix.
        TypeError: integer input.

    Differs from `torch.nn.functional.rms_norm`: the output has the input's dtype for any weight dtype (torch promotes
    unless asked otherwise); everything after ``eps`` is new; a negative eps is refused.
    """
    plain = out is None and channel_dim == -1 and output_dtype == "input" and partial == 1 and groups == 1
    if plain and _is_shape_of(weight, normalized_shape):
        y: Tensor | tuple[Tensor, Tensor] | None = None
        if residual is None and gate is None:
            y = short.row(False, input, weight, bias, eps, weight_offset, rounding)
        elif gate is None:
            assert residual is not None
            y = short.add_row(False, input, residual, weight, bias, eps, weight_offset, rounding)
        elif residual is None and bias is None:
            y = short.gated_row(input, gate, weight, eps, weight_offset, rounding, gate_kind)
        if y is not None:
            return y
    check_floating("input", input)
    if eps is None:
        eps = torch.finfo(compute_dtype(input.dtype, NormSpec())).eps
    check_eps(eps)
    spec = make_spec(
        channel_dim=_channel_dim(input, normalized_shape, channel_dim),
        groups=groups,
        partial=partial,
        centered=False,
        eps=eps,
        has_weight=weight is not None,
        weight_offset=weight_offset if weight is not None else 0.0,
        has_bias=bias is not None,
        weight_shape=_weight_shape(weight, normalized_shape),
        rounding=rounding,
        output_dtype=output_dtype,
        gate=None if gate is None else gate_kind,
    )
    return norm(input, spec, weight, bias, residual=residual, gate=gate, out=out)  # type: ignore[arg-type]


def _is_shape_of(weight: Tensor | None, normalized_shape: int | Sequence[int]) -> bool:
    """Whether the gain has just the feature dims (asked without a conversion of what the caller gave)."""
    return isinstance(weight, Tensor) and weight.shape == normalized_shape


def _channel_dim(x: Tensor, normalized_shape: int | Sequence[int], channel_dim: int) -> int | tuple[int, ...]:
    """Where the features are, once x is seen to have the shape that was promised."""
    check_floating("input", x)
    shape = as_shape(normalized_shape)
    if channel_dim == -1:
        if x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape:
            raise ValueError(
                f"normalized_shape {shape} must equal the last {len(shape)} dims of input; got shape {tuple(x.shape)}"
            )
        return -1 if len(shape) == 1 else tuple(range(-len(shape), 0))
    if len(shape) != 1:
        raise ValueError(f"channel_dim={channel_dim} needs one feature dim; got normalized_shape {shape}")
    if x.dim() < 2 or x.shape[1] != shape[0]:
        raise ValueError(f"normalized_shape {shape} must equal dim 1 of input; got shape {tuple(x.shape)}")
    return channel_dim


def _weight_shape(weight: Tensor | None, normalized_shape: int | Sequence[int]) -> WeightShape:
    if weight is None:
        return "features"
    check_floating("weight", weight)
    shape = as_shape(normalized_shape)
    if weight.dim() == 0 or (tuple(weight.shape) == (1,) and shape != (1,)):
        return "scalar"
    return "per_head" if weight.dim() > len(shape) else "features"
