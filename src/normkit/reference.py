"""The definition: any NormSpec in plain PyTorch.

Tests, benchmarks, the fallback and double backward all import this one function. It runs in any dtype,
on any device, under every transform, and is exact to float64 rounding when given float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.checks import check_arguments
from normkit.spec import NormSpec, partial_count

_HALF = (torch.float16, torch.bfloat16)


class Statistics(NamedTuple):
    """What one normalization divides by, with the reduced dims kept (broadcasts against the grouped input)."""

    mean: Tensor
    """c of the formula; zeros where the spec is not centered."""
    square: Tensor
    """s of the formula, before eps."""
    count: Tensor | int
    """How many elements share one statistic (a tensor under a mask)."""


class Measured(NamedTuple):
    """What a forward pass knows of each statistic and its backward needs: small tensors, reduced dims kept.

    All are of ``x * scale`` (see `overflow_scale`), so that neither pass leaves the range of its dtype.
    """

    mean: Tensor
    """The first estimate of the mean; zero where the spec is not centered."""
    correction: Tensor
    """What the first estimate missed: the mean of ``x - mean``. Kept apart, for their sum cannot hold it."""
    square: Tensor
    count: Tensor | int
    scale: Tensor | None

    def statistics(self) -> Statistics:
        """Mean and square in x's own scale."""
        mean = (self.mean + self.correction).expand_as(self.square)
        if self.scale is None:
            return Statistics(mean, self.square, self.count)
        return Statistics(mean / self.scale, self.square / self.scale / self.scale, self.count)


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> Tensor:
    r"""Evaluate a NormSpec: ``y = (x - c) / sqrt(s + eps) * (weight_offset + weight) + bias``.

    Body order: validate, upcast, statistic, rsqrt, affine, downcast.

    Args:
        x: the input, float16, bfloat16, float32 or float64; any layout, kept.
        spec: what to compute.
        weight: stored gain: features, ``[..., heads, features]`` for ``per_head``, ``[]`` or ``[1]`` for ``scalar``.
        bias: same shape as the features; with a gain ``per_head`` it may have the gain's.
        gate: same shape as ``x``, required exactly when ``spec.gate`` is set.
        mask: x's shape without the channel dim, True (or 1) at valid positions. Batch, instance and group only:
            other positions do not count, and their output is zero.
        running_mean: given with ``running_var`` (batch and instance only), both ``[C]``: used instead of the
            input's own statistics.
        running_var: see ``running_mean``.

    Returns:
        The result in the dtype that ``spec.output_dtype`` declares, in x's layout.

    Raises:
        TypeError: an input that is not floating point.
        ValueError: a missing, superfluous or wrongly shaped argument.
    """
    return normalize_measured(x, spec, weight, bias, gate, mask, running_mean, running_var)[0]


def normalize_measured(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    measured: Measured | None = None,
) -> tuple[Tensor, Measured | None]:
    """`normalize`, with what was measured on the way (None where running statistics were used).

    ``measured`` given, x is not measured: it may be one part of what shares the statistics.
    """
    check_arguments(x, spec, weight, bias, gate, mask, running_mean, running_var)
    if spec.statistic == "unbiased" and running_mean is None and mask is None:
        _check_unbiased(x, spec)
    compute = compute_dtype(x.dtype, spec)
    z = x.to(compute)
    valid = None if mask is None else align_mask(mask, spec, x.dim())
    if valid is not None:  # whatever padding holds, NaN too, enters neither the result nor a gradient
        z = torch.where(valid, z, 0)
        gate = gate if gate is None else torch.where(valid, gate, 0)
    gate_factor = None if gate is None else activate(gate.to(compute), spec)
    if gate_factor is not None and spec.gate is not None and spec.gate[1] == "before":
        z = z * gate_factor
    gain = form_gain(weight, spec, x.dim(), compute)
    shift = None if bias is None else align(bias, spec, x.dim())
    if running_mean is not None and running_var is not None:
        y = _with_running(z, spec, gain, shift, running_mean, running_var, x.dtype)
    else:
        normalized, measured = standardize(z, spec, mask, measured)
        y = _affine(normalized, spec, gain, shift, x.dtype, weight)
        if y is normalized and (spec.groups > 1 or spec.axes == "group"):
            y = y.clone()  # a view by now, which autograd would forbid to change in place where a Function returns it
    if gate_factor is not None and spec.gate is not None and spec.gate[1] == "after":
        y = y.to(compute) * gate_factor
    if valid is not None:
        y = torch.where(valid, y, 0)
    return y.to(output_dtype(x.dtype, spec, weight, bias)), measured


def statistics(x: Tensor, spec: NormSpec, mask: Tensor | None = None) -> Statistics:
    """The mean and the (squared) spread that `normalize` would divide by, in its compute dtype.

    The variance takes the corrected two-pass form: subtract the mean, subtract the mean of what is left, square.
    For ``groups > 1`` the channel dim is split in two, and the statistics have that rank.
    """
    z = x.to(compute_dtype(x.dtype, spec))
    if mask is not None:
        z = torch.where(align_mask(mask, spec, x.dim()), z, 0)
    return standardize(z, spec, mask)[1].statistics()


def compute_dtype(dtype: torch.dtype, spec: NormSpec) -> torch.dtype:
    """Where the statistic is formed: at least float32, unless the spec never leaves the input's dtype."""
    return dtype if spec.rounding == "none" else torch.promote_types(dtype, torch.float32)


def output_dtype(
    dtype: torch.dtype, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None
) -> torch.dtype:
    """The dtype that the spec declares for its result."""
    if spec.output_dtype == "weight" and weight is not None:
        return weight.dtype
    if spec.output_dtype == "promoted":
        for parameter in (weight, bias):
            if parameter is not None:
                dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype


def form_gain(weight: Tensor | None, spec: NormSpec, ndim: int, compute: torch.dtype = torch.float32) -> Tensor | None:
    """``weight_offset + weight``, in the dtype the spec forms it in, shaped to broadcast against the input.

    ``gain_dtype="float32"`` means the compute dtype, which is float64 for float64 input.
    """
    if weight is None:
        return None
    if spec.weight_offset != 0:
        if spec.gain_dtype == "float32" and spec.rounding != "none":
            weight = weight.to(torch.promote_types(weight.dtype, compute))
        weight = weight + spec.weight_offset
    return weight if spec.weight_shape != "features" else align(weight, spec, ndim)


def align(parameter: Tensor, spec: NormSpec, ndim: int) -> Tensor:
    """Shape a per-feature or per-channel parameter to broadcast against an input of ``ndim`` dims."""
    if spec.channel_dim == 1 and ndim > 2:
        return parameter.reshape(-1, *[1] * (ndim - 2))
    return parameter


def reduced_dims(spec: NormSpec, ndim: int) -> tuple[int, ...]:
    """The dims that one statistic runs over, in an input of ``ndim`` dims (plus one once groups are split off)."""
    if isinstance(spec.channel_dim, tuple):
        return spec.channel_dim
    channel = spec.channel_dim % ndim
    split = spec.groups > 1 or spec.axes == "group"
    within = channel + 1 if split else channel  # the channels of one group, once the channel dim is split
    space = [d if d < channel or not split else d + 1 for d in range(1, ndim) if d != channel]
    return {
        "features": (within,),
        "batch": (0, *space),
        "instance": tuple(space),
        "group": tuple(sorted((within, *space))),
    }[spec.axes]


def split(x: Tensor, spec: NormSpec) -> Tensor:
    """Cut the channel dim into (groups, channels of one group) where groups share a statistic."""
    if spec.groups > 1 or spec.axes == "group":
        assert isinstance(spec.channel_dim, int)
        c = spec.channel_dim % x.dim()
        return x.reshape(*x.shape[:c], spec.groups, x.shape[c] // spec.groups, *x.shape[c + 1 :])
    return x


def _split_mask(mask: Tensor, spec: NormSpec) -> Tensor:
    """The aligned mask, with the extra dim that `_split` gives the input."""
    if spec.groups > 1 or spec.axes == "group":
        assert isinstance(spec.channel_dim, int)
        return mask.unsqueeze(spec.channel_dim % mask.dim())
    return mask


def standardize(
    z: Tensor, spec: NormSpec, mask: Tensor | None, measured: Measured | None = None
) -> tuple[Tensor, Measured]:
    """x̂, the input with its mean removed (if centered) and divided by the root of its statistic; and the statistic."""
    groups = split(z, spec)
    if measured is None:
        valid = None if mask is None else _split_mask(align_mask(mask, spec, z.dim()), spec)
        scale = overflow_scale(groups, spec)
        d, measured = _center(groups if scale is None else groups * scale, spec, valid, scale)
    else:
        d = groups if measured.scale is None else groups * measured.scale
        d = d - measured.mean - measured.correction if spec.centered else d
    if spec.eps_at == "variance":
        return merge(d * inverse_root(measured, spec), z), measured
    return merge(d / _divisor(measured, spec), z), measured


def inverse_root(measured: Measured, spec: NormSpec) -> Tensor:
    """What x - c is multiplied by. Without an eps, 0 where all of x - c is 0."""
    if spec.eps_at != "variance":
        return 1 / _divisor(measured, spec)
    if spec.eps == 0:
        still = measured.square == 0
        return torch.where(still, 0, torch.rsqrt(torch.where(still, 1, measured.square)))
    scale = measured.scale
    return torch.rsqrt(measured.square + (spec.eps if scale is None else spec.eps * scale * scale))


def inverse_slope(measured: Measured, spec: NormSpec) -> Tensor:
    """How the divisor follows its statistic: -(d inverse_root / d s) * 2 (x - c) is this times x̂."""
    if spec.eps_at == "variance":
        return inverse_root(measured, spec)
    root = _root(measured.square)
    moves = root > 0 if spec.eps_at == "std" else root > _scaled_eps(measured, spec)
    return torch.where(moves, 1 / torch.where(moves, root, 1), 0)


def _divisor(measured: Measured, spec: NormSpec) -> Tensor:
    root = _root(measured.square)
    if spec.eps == 0:
        return torch.where(root == 0, math.inf, root)
    eps = _scaled_eps(measured, spec)
    if spec.eps_at == "std":
        return root + eps
    return torch.maximum(root, eps) if isinstance(eps, Tensor) else root.clamp_min(eps)


def _scaled_eps(measured: Measured, spec: NormSpec) -> float | Tensor:
    return spec.eps if measured.scale is None else spec.eps * measured.scale


def merge(groups: Tensor, like: Tensor) -> Tensor:
    """Undo `split`."""
    return groups if groups.dim() == like.dim() else groups.reshape(like.shape)


def _center(x: Tensor, spec: NormSpec, valid: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Measured]:
    """x - c and the statistic, over the dims that share one."""
    dims = split_dims(x, spec)
    inside = x
    if spec.partial < 1:
        inside = x.narrow(dims[0], 0, partial_count(spec.partial, x.shape[dims[0]]))
    count = _count(inside, dims, valid)
    mean = correction = torch.zeros((), dtype=x.dtype, device=x.device)
    d, rest = x, inside
    if spec.centered:
        mean = _mean(inside, dims, valid, count)
        d, rest = x - mean, inside - mean
        if x.dtype not in _HALF:  # the mean's own rounding error, which grows with |mean| / std
            correction = _mean(rest, dims, valid, count)
            d, rest = d - correction, rest - correction
    if spec.statistic == "mean_square":
        s = _mean(rest.pow(2), dims, valid, count)
    else:
        s = _sum(rest.pow(2), dims, valid)
        if spec.statistic == "unbiased":
            s = s / divisor(count, spec)
    return d, Measured(mean, correction, s, count, scale)


def divisor(count: Tensor | int, spec: NormSpec) -> Tensor | int:
    """What the sum of squares is divided by. (A masked group may hold nothing: it has no output either.)"""
    if spec.statistic == "sum":
        return 1
    n = count - 1 if spec.statistic == "unbiased" else count
    return n.clamp_min(1) if isinstance(n, Tensor) else n


def split_dims(groups: Tensor, spec: NormSpec) -> tuple[int, ...]:
    """The dims that one statistic runs over, in an input whose groups were split off."""
    return reduced_dims(spec, groups.dim() - (1 if spec.groups > 1 or spec.axes == "group" else 0))


def count_elements(x: Tensor, spec: NormSpec, mask: Tensor | None) -> Tensor | int:
    """How many elements of x share one statistic (a tensor under a mask, reduced dims kept, groups split off)."""
    groups = split(x, spec)
    valid = None if mask is None else _split_mask(align_mask(mask, spec, x.dim()), spec)
    dims = split_dims(groups, spec)
    inside = groups if spec.partial == 1 else groups.narrow(dims[0], 0, partial_count(spec.partial, x.shape[dims[0]]))
    return _count(inside, dims, valid)


def _count(x: Tensor, dims: tuple[int, ...], valid: Tensor | None) -> Tensor | int:
    if valid is None:
        return math.prod([x.shape[d] for d in dims])  # a list: torch.compile cannot trace a generator here
    count = valid.sum(dims, keepdim=True) if dims else valid.to(torch.int64)
    for d in dims:  # a dim that the mask does not have (the channels of a group) counts in full
        if valid.shape[d] == 1:
            count = count * x.shape[d]
    return count


def _sum(x: Tensor, dims: tuple[int, ...], valid: Tensor | None) -> Tensor:
    x = x if valid is None else torch.where(valid, x, 0)
    return x.sum(dims, keepdim=True) if dims else x  # torch reads an empty tuple as all dims


def _mean(x: Tensor, dims: tuple[int, ...], valid: Tensor | None, count: Tensor | int) -> Tensor:
    if valid is None:  # spelled as model code spells it, so that half-precision results keep its bits
        return x.mean(dims, keepdim=True) if dims else x
    return _sum(x, dims, valid) / (count.clamp_min(1) if isinstance(count, Tensor) else count)


def _root(s: Tensor) -> Tensor:
    """sqrt with a zero gradient at zero, where autograd's own gives inf and then NaN."""
    positive = s != 0
    return torch.where(positive, torch.where(positive, s, 1).sqrt(), torch.zeros_like(s))


def overflow_scale(x: Tensor, spec: NormSpec) -> Tensor | None:
    """A power of two per statistic that keeps squares inside the dtype.

    A norm does not change when x and eps scale together, and a power of two rounds nothing: rows of ordinary size
    get the factor 1 and keep their bits; rows whose squares would overflow come out right instead of zero.
    Without an eps, rows whose squares would underflow do too.
    """
    if x.dtype in _HALF or x.numel() == 0:
        return None
    dims = split_dims(x, spec)
    if not dims:
        return None
    largest = x.detach().abs().amax(dims, keepdim=True)
    exponent = torch.frexp(largest).exponent
    bound = math.frexp(torch.finfo(x.dtype).max)[1] // 2 - 24  # 2^24 elements may add up
    needed = exponent > bound
    if spec.eps == 0:
        needed = needed | (exponent < -bound) & (largest > 0)
    furthest = (
        math.frexp(torch.finfo(x.dtype).max)[1] - 2
    )  # 2^shift is a normal number; subnormal rows come closer to 1
    shift = torch.where(needed & torch.isfinite(largest), -exponent, 0).clamp(-furthest, furthest)
    return torch.ldexp(torch.ones_like(largest), shift)


def _affine(
    normalized: Tensor,
    spec: NormSpec,
    gain: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
    weight: Tensor | None,
) -> Tensor:
    """Gain and bias, with the rounding that the spec puts before or after them."""
    if spec.rounding == "after_gain":
        if gain is not None:
            normalized = normalized * gain.to(normalized.dtype)
        return normalized if shift is None else normalized + shift.to(normalized.dtype)
    if spec.rounding == "before_gain":
        rounded = weight.dtype if spec.output_dtype == "weight" and weight is not None else dtype
        normalized = normalized.to(rounded)
    if gain is not None:
        normalized = normalized * gain
    return normalized if shift is None else normalized + shift


def _with_running(
    z: Tensor,
    spec: NormSpec,
    gain: Tensor | None,
    shift: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Normalize by given statistics."""
    mean, var = align(running_mean, spec, z.dim()), align(running_var, spec, z.dim())
    if spec.rounding != "none":
        mean, var = mean.to(z.dtype), var.to(z.dtype)
    if spec.eps_at == "variance":
        inverse = torch.rsqrt(var + spec.eps)
    elif spec.eps_at == "std":
        inverse = 1 / (var.sqrt() + spec.eps)
    else:
        inverse = 1 / var.sqrt().clamp_min(spec.eps)
    if spec.rounding == "none":  # folded first, as frozen batch norms do: in half precision the bits depend on it
        scale = inverse if gain is None else gain * inverse
        offset = -mean * scale if shift is None else shift - mean * scale
        return z * scale + offset
    return _affine((z - mean) * inverse, spec, gain, shift, dtype, None)


def activate(gate: Tensor, spec: NormSpec) -> Tensor:
    """The factor that a gate becomes: silu or sigmoid of it."""
    assert spec.gate is not None
    return torch.nn.functional.silu(gate) if spec.gate[0] == "silu" else torch.sigmoid(gate)


def align_mask(mask: Tensor, spec: NormSpec, ndim: int) -> Tensor:
    """A mask as booleans that broadcast against x."""
    assert isinstance(spec.channel_dim, int)
    return mask.to(torch.bool).unsqueeze(spec.channel_dim % ndim)


def _check_unbiased(x: Tensor, spec: NormSpec) -> None:
    n = count_elements(x, spec, None)
    if x.numel() > 0 and isinstance(n, int) and n < 2:
        raise ValueError(f"statistic='unbiased' needs at least 2 elements; x of shape {tuple(x.shape)} gives {n}")
