"""The plain form of every operator, with the operator's own arguments, evaluated by `normkit.reference`.

Tests compare against these; transforms, double backward and inputs without a kernel run on them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from normkit.reference import normalize, statistics
from normkit.spec import Gate, NormSpec, OutputDtype, WeightShape

_HALF = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=256)
def row_spec(
    centered: bool,
    eps: float,
    weight_offset: float,
    gain_in_input: bool,
    round_before_gain: bool,
    has_weight: bool,
    has_bias: bool,
    weight_shape: WeightShape,
    output_dtype: OutputDtype,
    gate: Gate | None,
) -> NormSpec:
    """The NormSpec that a row operator's arguments describe."""
    return NormSpec(
        centered=centered,
        eps=eps,
        weight_offset=weight_offset if has_weight else 0.0,
        gain_dtype="input" if gain_in_input else "float32",
        rounding="before_gain" if round_before_gain else "after_gain",
        has_weight=has_weight,
        has_bias=has_bias,
        weight_shape=weight_shape,
        output_dtype=output_dtype,
        gate=gate,
    )


def _row_norm(
    centered: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    gain_in_input: bool,
    round_before_gain: bool,
    dtype: torch.dtype | None,
    gate: Tensor | None = None,
    gate_kind: Gate | None = None,
) -> Tensor:
    dtype = dtype or x.dtype
    output: OutputDtype = "input"
    if not round_before_gain and x.is_floating_point():
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # exact; and only `dtype` rounds
    elif dtype != x.dtype and x.dtype in _HALF:  # rounded to x's dtype, and the product to `dtype` alone
        output = "promoted"
        if weight is not None:
            weight = weight if gain_in_input else weight.to(torch.promote_types(weight.dtype, torch.float32))
            weight = (weight + weight_offset).to(torch.promote_types(weight.dtype, torch.float32))
            weight_offset, gain_in_input = 0.0, False
    elif dtype != x.dtype and weight is not None and weight.dtype == dtype:
        output = "weight"
    weight_shape: WeightShape = "features"
    if weight is not None and weight.dim() != 1:
        weight_shape = "per_head" if weight.dim() > 1 else "scalar"
    per_head_bias = bias if bias is not None and bias.dim() > 1 else None  # a spec's bias has the features' shape
    if per_head_bias is not None:
        bias = None
    spec = row_spec(
        centered, eps, weight_offset, gain_in_input, round_before_gain, weight is not None, bias is not None,
        weight_shape, output, gate_kind,
    )  # fmt: skip
    y = normalize(x, spec, weight, bias, gate=gate)
    return (y if per_head_bias is None else y + per_head_bias).to(dtype)


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    gain_in_input: bool = False,
    round_before_gain: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`rms_norm` in plain PyTorch."""
    return _row_norm(False, x, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    gain_in_input: bool = False,
    round_before_gain: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`layer_norm` in plain PyTorch."""
    return _row_norm(True, x, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, dtype)


def _add(x: Tensor, residual: Tensor) -> Tensor:
    """The residual sum, formed in at least float32 and rounded once, to the residual's dtype."""
    compute = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    return (x.to(compute) + residual.to(compute)).to(residual.dtype)


def add_rms_norm_reference(
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
    """`add_rms_norm` in plain PyTorch."""
    total = _add(x, residual)
    rounds = round_before_gain and (residual.dtype in _HALF or (dtype or x.dtype) != x.dtype)
    return _row_norm(False, total, weight, bias, eps, weight_offset, gain_in_input, rounds, dtype or x.dtype), total


def add_layer_norm_reference(
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
    """`add_layer_norm` in plain PyTorch."""
    total = _add(x, residual)
    rounds = round_before_gain and (residual.dtype in _HALF or (dtype or x.dtype) != x.dtype)
    return _row_norm(True, total, weight, bias, eps, weight_offset, gain_in_input, rounds, dtype or x.dtype), total


def gated_rms_norm_reference(
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
    """`gated_rms_norm` in plain PyTorch."""
    kind: Gate = ("silu" if silu else "sigmoid", "before" if gate_before else "after")
    return _row_norm(False, x, weight, None, eps, weight_offset, gain_in_input, round_before_gain, None, gate, kind)


# ---- channels: dim 1 ----


@lru_cache(maxsize=256)
def _channel_spec(axes: str, eps: float, has_weight: bool, has_bias: bool, groups: int = 1) -> NormSpec:
    return NormSpec(
        axes=axes,  # type: ignore[arg-type]
        channel_dim=1,
        eps=eps,
        has_weight=has_weight,
        has_bias=has_bias,
        groups=groups,
    )


def group_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, groups: int = 1, eps: float = 1e-5
) -> Tensor:
    """`group_norm` in plain PyTorch."""
    return normalize(x, _channel_spec("group", eps, weight is not None, bias is not None, groups), weight, bias)


def batch_norm_train_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`batch_norm_train` in plain PyTorch: (y, mean, variance, count), the statistics detached."""
    spec = _channel_spec("batch", eps, weight is not None, bias is not None)
    y = normalize(x, spec, weight, bias, mask=mask)
    s = statistics(x.detach(), spec, mask)
    count = s.count if isinstance(s.count, Tensor) else torch.full((), float(s.count), device=x.device)
    count = count.reshape(()).to(torch.float64)
    if mask is not None:
        count = mask.to(torch.bool).sum().to(torch.float64)  # the reference never counts below one
    return y, s.mean.reshape(-1).to(torch.float64), s.square.reshape(-1).to(torch.float64), count


def batch_norm_reference(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`batch_norm` (given statistics) in plain PyTorch."""
    spec = _channel_spec("batch", eps, weight is not None, bias is not None)
    return normalize(x, spec, weight, bias, mask=mask, running_mean=mean, running_var=variance)


def channel_layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`channel_layer_norm` in plain PyTorch."""
    return normalize(x, _channel_spec("features", eps, weight is not None, bias is not None), weight, bias)
