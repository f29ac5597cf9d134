"""From a NormSpec to the operator that computes it: chosen once, called often.

`operator` gives a function of tensors for any spec that has one; the function answers None where the operator does not
take these tensors. `bind` puts `normkit.reference` in those places. `measuring` and `given` are for norms with running
statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from normkit.ops import channels, rows
from normkit.ops import out as _out
from normkit.reference import normalize, output_dtype
from normkit.spec import NormSpec

Bound = Callable[..., Tensor | None]
_HALF = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=512)
def bind(spec: NormSpec) -> Callable[..., Tensor]:
    """A function ``f(x, weight=None, bias=None, *, gate=None, mask=None)`` that evaluates the spec.

    Statistics are the input's own: batch norms with running statistics are `batch_norm_train` and `batch_norm`.
    """
    run = operator(spec)

    def evaluate(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        gate: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        y = None if run is None else run(x, weight, bias, gate=gate, mask=mask)
        return normalize(x, spec, weight, bias, gate=gate, mask=mask) if y is None else y

    return evaluate


@lru_cache(maxsize=4096)
def operator(spec: NormSpec) -> Bound | None:
    """A function ``f(x, weight, bias, *, gate, mask, out)`` that calls the operator for the spec.

    It gives None where the operator does not take the arguments; with ``out``, where it cannot write there.
    """
    return _rows(spec) or _channels(spec)


def _plain_statistic(spec: NormSpec) -> bool:
    # Without an eps the reference scales small rows up, and takes 0 / 0 for 0.
    return spec.statistic == "mean_square" and spec.eps_at == "variance" and spec.partial == 1 and spec.eps > 0


def _dtype(spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype | None:
    """The output dtype for a row operator; None is x's own."""
    return None if spec.output_dtype == "input" else output_dtype(x.dtype, spec, weight, bias)


def _rows(spec: NormSpec) -> Bound | None:
    """Features in the trailing dims, or in dim 1 of memory that has them last."""
    if spec.axes != "features" or not _plain_statistic(spec) or spec.weight_shape == "scalar":
        return None
    if spec.rounding == "none" and spec.output_dtype != "input":
        return None
    if spec.channel_dim == 1 and (spec.groups > 1 or spec.gate is not None or _channels(spec) is not None):
        return None
    plain, into = (rows.layer_norm, _out.layer_norm_out) if spec.centered else (rows.rms_norm, _out.rms_norm_out)
    eps, offset = spec.eps, spec.weight_offset
    before = spec.rounding == "before_gain"
    everywhere = spec.rounding == "none"  # no float32 at all: kernels only where there is nothing narrower
    in_input = spec.gain_dtype == "input" or everywhere
    gate_before = spec.gate is not None and spec.gate[1] == "before"
    gated = spec.gate is not None and not spec.centered
    silu = spec.gate is not None and spec.gate[0] == "silu"
    ndim = len(spec.channel_dim) if isinstance(spec.channel_dim, tuple) else 1
    groups = spec.groups
    first = spec.channel_dim == 1
    if (spec.gate is not None and not gated) or (spec.has_bias and (before or gated)):
        return None
    if spec.has_bias and not spec.has_weight and groups > 1:  # the backward sums over rows as the gain repeats in them
        return None
    simple = ndim == 1 and groups == 1 and spec.gate is None and not everywhere and not first
    takes_weight, takes_bias = spec.has_weight, spec.has_bias

    def run(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        gate: Tensor | None = None, mask: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        if mask is not None or (weight is not None) != takes_weight or (bias is not None) != takes_bias:
            return None
        if (gate is not None) != gated or x.numel() == 0 or not x.is_floating_point():
            return None
        dtype = _dtype(spec, x, weight, bias)
        rounds = before
        if before and dtype is not None and x.dtype in _HALF and spec.output_dtype == "weight":
            if dtype in _HALF and dtype != x.dtype:  # rounded to the weight's dtype: of two half types no kernel has it
                return None
            rounds = dtype == x.dtype
        if simple:
            if out is None:
                return plain(x, weight, bias, eps, offset, in_input, rounds, dtype)
            return into(x, weight, bias, eps, offset, in_input, rounds, out=out)
        least = max(ndim, 2 if first else 1)
        if (everywhere and x.dtype in _HALF) or x.dim() < least or (groups > 1 and x.shape[-1] % groups):
            return None
        if any(t is not None and t.dim() < ndim for t in (weight, bias, gate)):
            return None
        if first:
            return None if out is not None else _first(x, weight, bias, plain, eps, offset, in_input, rounds, dtype)
        if gated and ((dtype is not None and dtype != x.dtype) or gate is None or gate.dtype != x.dtype):
            return None
        if out is not None and not out.is_contiguous():
            return None
        flat, w, b, z, target = (_as_rows(t, ndim, groups) for t in (x, weight, bias, gate, out))
        if gated:
            options = (flat, z, w, eps, offset, in_input, rounds, silu, gate_before)
            y = rows.gated_rms_norm(*options) if out is None else _gated_into(*options, out=target)  # type: ignore[arg-type]
        elif out is None:
            y = plain(flat, w, b, eps, offset, in_input, rounds, dtype)  # type: ignore[arg-type]
        else:
            y = into(flat, w, b, eps, offset, in_input, rounds, out=target)  # type: ignore[arg-type]
        return y.reshape(x.shape) if out is None else out

    return run


_gated_into = _out.gated_rms_norm_out


def _first(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, plain: Callable[..., Tensor], *options: object
) -> Tensor | None:
    """Features in dim 1, where the memory has them last."""
    last = x.movedim(1, -1)
    return plain(last, weight, bias, *options).movedim(-1, 1) if last.is_contiguous() else None


def _as_rows(t: Tensor | None, ndim: int, groups: int) -> Tensor | None:
    """Several feature dims as one; features in groups as rows of their own."""
    if t is None:
        return None
    if ndim > 1:
        t = t.flatten(-ndim)
    return t.unflatten(-1, (groups, -1)) if groups > 1 else t


def _plain_channels(spec: NormSpec) -> bool:
    return (
        isinstance(spec.channel_dim, int)
        and (spec.axes != "features" or (spec.channel_dim == 1 and spec.groups == 1))
        and _plain_statistic(spec)
        and spec.centered
        and (spec.weight_offset == 0 or spec.gain_dtype == "float32")
        and spec.weight_shape == "features"
        and spec.gate is None
        and spec.rounding == "after_gain"
        and spec.output_dtype == "input"
    )


def _matches(spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the arguments are those that the spec announces. (What else is wrong, the operator refuses.)"""
    given = (weight is not None) == spec.has_weight and (bias is not None) == spec.has_bias
    return given and x.dim() >= 2 and x.numel() > 0 and x.is_floating_point()


def _gain(spec: NormSpec, x: Tensor, weight: Tensor | None) -> Tensor | None:
    """The gain, formed in the compute dtype."""
    if weight is None or spec.weight_offset == 0:
        return weight
    compute = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return weight.to(compute) + spec.weight_offset


def _channels(spec: NormSpec) -> Bound | None:
    """Statistics of channels, channels first or last."""
    if not _plain_channels(spec) or spec.frozen:
        return None
    eps, axes, groups = spec.eps, spec.axes, spec.groups
    last = spec.channel_dim == -1

    def run(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        gate: Tensor | None = None, mask: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        if gate is not None or (mask is not None and axes != "batch") or not _matches(spec, x, weight, bias):
            return None
        if axes == "instance" and x.dim() < 3:
            return None
        v = x.movedim(-1, 1) if last else x
        target = out.movedim(-1, 1) if last and out is not None else out
        gain = _gain(spec, x, weight)
        if axes == "batch":
            if out is not None:
                return None
            y = channels.batch_norm_train(v, gain, bias, mask, eps)[0]
        elif axes == "features":
            y = _call(channels.channel_layer_norm, _out.channel_layer_norm_out, target, v, gain, bias, eps)
        else:
            count = groups if axes == "group" else v.shape[1]
            if v.shape[1] % count:
                return None
            y = _call(channels.group_norm, _out.group_norm_out, target, v, gain, bias, count, eps)
        return out if out is not None else y.movedim(1, -1) if last else y

    return run


def _call(plain: Callable[..., Tensor], into: Callable[..., Tensor], target: Tensor | None, *args: object) -> Tensor:
    return plain(*args) if target is None else into(*args, out=target)


@lru_cache(maxsize=512)
def measuring(spec: NormSpec) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | int] | None] | None:
    """A function ``f(x, weight, bias, mask)`` for batch and instance norms that keep running statistics.

    It gives (y, mean, variance, count): ``[C]`` each for batch statistics, ``[N, C]`` for instance ones; the count a
    tensor under a mask. None where the operator does not take the arguments.
    """
    if spec.axes not in ("batch", "instance") or not _plain_channels(spec):
        return None
    last, eps = spec.channel_dim == -1, spec.eps

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | int] | None:
        if not _matches(spec, x, weight, bias):
            return None
        v = x.movedim(-1, 1) if last else x
        gain = _gain(spec, x, weight)
        if spec.axes == "batch":
            if mask is not None and mask.shape != v.shape[:1] + v.shape[2:]:
                return None
            y, mean, variance, counted = channels.batch_norm_train(v, gain, bias, mask, eps)
            count: Tensor | int = v.numel() // v.shape[1] if mask is None else counted
        elif mask is None and x.dim() > 2:
            found = channels.group_norm_with_statistics(v, gain, bias, v.shape[1], eps)
            if found is None:
                return None
            y, mean, variance = found
            count = v[0, 0].numel()
        else:
            return None
        return y.movedim(1, -1) if last else y, mean, variance, count

    return run


@lru_cache(maxsize=512)
def given(spec: NormSpec) -> Bound | None:
    """A function ``f(x, mean, variance, weight, bias, mask)`` that normalizes by given statistics of each channel."""
    if spec.axes not in ("batch", "instance") or not _plain_channels(spec):
        return None
    last, eps = spec.channel_dim == -1, spec.eps

    def run(
        x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        if not _matches(spec, x, weight, bias):
            return None
        v = x.movedim(-1, 1) if last else x
        if mask is not None and mask.shape != v.shape[:1] + v.shape[2:]:
            return None
        y = channels.batch_norm(v, mean, variance, _gain(spec, x, weight), bias, mask, eps)
        return y.movedim(1, -1) if last else y

    return run


def add_and_norm(
    x: Tensor, residual: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """(norm of ``x + residual``, the sum) by one operator, or None where there is none for the spec."""
    simple = (
        spec.axes == "features"
        and spec.channel_dim == -1
        and spec.groups == 1
        and spec.gate is None
        and spec.output_dtype == "input"
        and spec.rounding != "none"
        and spec.weight_shape == "features"
        and _plain_statistic(spec)
        and not (spec.rounding == "before_gain" and spec.has_bias)
        and (weight is not None) == spec.has_weight
        and (bias is not None) == spec.has_bias
    )
    if not simple:
        return None
    if residual.dtype != x.dtype and not (residual.dtype == torch.float32 and x.dtype in _HALF):
        return None
    add = rows.add_layer_norm if spec.centered else rows.add_rms_norm
    return add(
        x, residual, weight, bias, spec.eps, spec.weight_offset, spec.gain_dtype == "input",
        spec.rounding == "before_gain",
    )  # fmt: skip


__all__ = ["add_and_norm", "bind", "given", "measuring", "operator"]
