"""From a NormSpec to the operator that computes it: chosen once, called often.

`bind` gives a function of tensors for any spec. Where an operator computes the spec it is called directly, else
`normkit.reference` evaluates it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from normkit.ops import channels, rows
from normkit.reference import normalize
from normkit.spec import NormSpec

Bound = Callable[..., Tensor]
_HALF = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=512)
def bind(spec: NormSpec) -> Bound:
    """A function ``f(x, weight=None, bias=None, *, gate=None, mask=None)`` that evaluates the spec.

    Statistics are the input's own: batch norms with running statistics are `batch_norm_train` and `batch_norm`.
    """
    return _rows(spec) or _channels(spec) or _reference(spec)


def _reference(spec: NormSpec) -> Bound:
    def run(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        gate: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return normalize(x, spec, weight, bias, gate=gate, mask=mask)

    return run


def _plain_statistic(spec: NormSpec) -> bool:
    return spec.statistic == "mean_square" and spec.eps_at == "variance" and spec.partial == 1


def _dtype(spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype | None:
    """The output dtype for a row operator; None is x's own."""
    if spec.output_dtype == "input" or weight is None:
        return None
    if spec.output_dtype == "weight":
        return weight.dtype
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return dtype if bias is None else torch.promote_types(dtype, bias.dtype)


def _rows(spec: NormSpec) -> Bound | None:
    """Features in the trailing dims."""
    if spec.axes != "features" or spec.channel_dim == 1 or not _plain_statistic(spec) or spec.weight_shape == "scalar":
        return None
    if spec.rounding == "none" and spec.output_dtype != "input":
        return None
    operator = rows.layer_norm if spec.centered else rows.rms_norm
    reference = _reference(spec)
    eps, offset = spec.eps, spec.weight_offset
    in_input, before = spec.gain_dtype == "input", spec.rounding == "before_gain"
    everywhere = spec.rounding == "none"  # no float32 at all: kernels only where there is nothing narrower
    gate_before = spec.gate is not None and spec.gate[1] == "before"
    gated = spec.gate is not None and not spec.centered
    silu = spec.gate is not None and spec.gate[0] == "silu"
    ndim = len(spec.channel_dim) if isinstance(spec.channel_dim, tuple) else 1
    groups = spec.groups
    if (spec.gate is not None and not gated) or (before and spec.has_bias):
        return None
    simple = ndim == 1 and groups == 1 and spec.gate is None and not everywhere

    def run(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        gate: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if mask is not None or (weight is not None) != spec.has_weight or (bias is not None) != spec.has_bias:
            return reference(x, weight, bias, gate=gate, mask=mask)
        if not simple and (
            (everywhere and x.dtype in _HALF) or x.dim() < ndim or (gate is None) == gated
            or (groups > 1 and x.shape[-1] % groups)
        ):  # fmt: skip
            return reference(x, weight, bias, gate=gate)
        dtype = _dtype(spec, x, weight, bias)
        rounds = before
        if before and dtype is not None and x.dtype in _HALF and spec.output_dtype == "weight":
            if dtype in _HALF and dtype != x.dtype:  # rounded to the weight's dtype: of two half types no kernel has it
                return reference(x, weight, bias, gate=gate)
            rounds = dtype == x.dtype
        if simple:
            return operator(x, weight, bias, eps, offset, in_input, rounds, dtype)
        if gated and dtype is not None and dtype != x.dtype:
            return reference(x, weight, bias, gate=gate)
        shape = x.shape
        flat, w, b, z = (_as_rows(t, ndim, groups) for t in (x, weight, bias, gate))
        if gated:
            y = rows.gated_rms_norm(flat, z, w, eps, offset, in_input, rounds, silu, gate_before)  # type: ignore[arg-type]
        else:
            y = operator(flat, w, b, eps, offset, in_input, rounds, dtype)  # type: ignore[arg-type]
        return y.reshape(shape)

    return run


def _as_rows(t: Tensor | None, ndim: int, groups: int) -> Tensor | None:
    """Several feature dims as one; features in groups as rows of their own."""
    if t is None:
        return None
    if ndim > 1:
        t = t.flatten(-ndim)
    return t.unflatten(-1, (groups, -1)) if groups > 1 else t


def _channels(spec: NormSpec) -> Bound | None:
    """Channels in dim 1."""
    plain = (
        spec.channel_dim == 1
        and _plain_statistic(spec)
        and spec.centered
        and spec.weight_offset == 0
        and spec.weight_shape == "features"
        and spec.gate is None
        and spec.rounding == "after_gain"
        and spec.output_dtype == "input"
        and not spec.frozen
    )
    if not plain:
        return None
    reference = _reference(spec)
    eps, axes, groups = spec.eps, spec.axes, spec.groups

    def run(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        gate: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        fits = gate is None and (weight is not None) == spec.has_weight and (bias is not None) == spec.has_bias
        if not fits or x.dim() < 2 or (mask is not None and axes != "batch"):
            return reference(x, weight, bias, gate=gate, mask=mask)
        if axes == "group":
            return channels.group_norm(x, weight, bias, groups, eps)
        if axes == "instance":
            return channels.instance_norm(x, weight, bias, eps)
        if axes == "batch":
            return channels.batch_norm_train(x, weight, bias, mask, eps)[0]
        return channels.channel_layer_norm(x, weight, bias, eps)

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
    operator = rows.add_layer_norm if spec.centered else rows.add_rms_norm
    return operator(
        x, residual, weight, bias, spec.eps, spec.weight_offset, spec.gain_dtype == "input",
        spec.rounding == "before_gain",
    )  # fmt: skip


__all__ = ["add_and_norm", "bind"]
