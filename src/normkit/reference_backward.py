"""The closed-form backward of any NormSpec without gate and given statistics, in plain PyTorch.

Autograd through `normkit.reference` gives the same numbers. What the closed form adds: it keeps x and a few numbers a
statistic instead of several float32 copies of x; it sums the gradients of gain and bias in float32 where the spec
multiplies in half precision; and it is the definition that native backward kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normkit.reference import (
    Measured,
    align,
    align_mask,
    compute_dtype,
    divisor,
    form_gain,
    inverse_root,
    inverse_slope,
    merge,
    output_dtype,
    split,
    split_dims,
    standardize,
)
from normkit.spec import NormSpec, partial_count

Total = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def normalize_backward(
    grad: Tensor,
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    measured: Measured | None = None,
    needed: tuple[bool, bool, bool] = (True, True, True),
    total: Total | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    r"""The gradients of ``(x, weight, bias)`` for `normkit.reference.normalize`.

    With ``h = grad * (weight_offset + weight)``, r the inverse root that multiplies x - c, S the set that shares it and
    n what the sum of squares was divided by::

        dx      = r * (h - mean_S(h)) - q * x̂ * sum_S(h * x̂) / n        (no mean_S(h) where the spec is not centered)
        dweight = sum(grad * x̂)
        dbias   = sum(grad)

    q is r, except where eps sits outside the root: ``1 / sqrt(s)``, and 0 where the divisor is the floor itself.

    Args:
        grad: the gradient of the result.
        x: the input of the forward pass.
        spec: what was computed, with ``gate=None``.
        weight: the stored gain.
        bias: the bias.
        mask: as in the forward pass; masked positions get a gradient of zero.
        measured: the forward's statistics. None measures x again, so that the result can be differentiated.
        needed: which of the three to compute; the others are None.
        total: adds up ``sum_S(h * x̂)`` and ``sum_S(h)`` over the processes that share the statistics.

    Returns:
        ``(dx, dweight, dbias)`` in the dtypes of x, weight and bias.
    """
    compute = compute_dtype(x.dtype, spec)
    z, g = x.to(compute), grad.to(compute)
    valid = None if mask is None else align_mask(mask, spec, x.dim())
    if valid is not None:
        z, g = torch.where(valid, z, 0), torch.where(valid, g, 0)
    normalized, measured = standardize(z, spec, mask, measured)
    gain = form_gain(weight, spec, x.dim(), compute)
    dx = dweight = dbias = None
    if needed[0]:
        h = split(g if gain is None else g * gain.to(compute), spec)
        dx = merge(_input_gradient(h, split(normalized, spec), measured, spec, total), z)
        dx = (dx if valid is None else torch.where(valid, dx, 0)).to(x.dtype)
    if needed[1] and weight is not None and gain is not None:
        if spec.rounding == "before_gain":  # the gain met a rounded x̂
            rounded = output_dtype(x.dtype, spec, weight) if spec.output_dtype == "weight" else x.dtype
            normalized = normalized.to(rounded).to(compute)
        dweight = (g * normalized).sum_to_size(gain.shape).reshape(weight.shape).to(weight.dtype)
    if needed[2] and bias is not None:
        dbias = g.sum_to_size(align(bias, spec, x.dim()).shape).reshape(bias.shape).to(bias.dtype)
    return dx, dweight, dbias


def _input_gradient(h: Tensor, unit: Tensor, measured: Measured, spec: NormSpec, total: Total | None) -> Tensor:
    """dx, in the shape with groups split off."""
    dims = split_dims(h, spec)
    inverse, slope = inverse_root(measured, spec), inverse_slope(measured, spec)
    along, mean = _sum(h * unit, dims), _sum(h, dims) if spec.centered else None
    if total is not None:
        along, mean = total(along, mean)
    pull = slope * (along / divisor(measured.count, spec)) * unit
    if mean is not None:
        n = measured.count.clamp_min(1) if isinstance(measured.count, Tensor) else measured.count
        pull = pull + inverse * (mean / n)
    if spec.partial < 1:  # features outside the statistic are only scaled by it
        features = h.shape[dims[0]]
        inside = (torch.arange(features, device=h.device) < partial_count(spec.partial, features)).to(h.dtype)
        pull = pull * inside.reshape(-1, *[1] * (h.dim() - 1 - dims[0] % h.dim()))
    dx = inverse * h - pull
    return dx if measured.scale is None else dx * measured.scale


def _sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.sum(dims, keepdim=True) if dims else x
