"""`norm`: any NormSpec as a function; and what all families share."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from normkit.checks import check_count, check_floating, check_same_device
from normkit.functional.evaluate import add_and_compute, compute, compute_into, needs_gradient
from normkit.reference import output_dtype
from normkit.spec import NormSpec


@overload
def norm(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...
@overload
def norm(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def norm(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply any NormSpec, optionally to a residual sum.

    ``y = (x - c) / sqrt(s + eps) * (weight_offset + weight) + bias``, with the mean c and the spread s of the spec.

    Args:
        x: the input.
        spec: what to compute; see `normkit.NormSpec` for formula and shapes.
        weight: the stored gain.
        bias: the bias.
        residual: added to ``x`` first. The sum is rounded to the residual's dtype before the statistic.
        gate: the second input of a gated norm, x's shape.
        mask: valid positions (batch, instance and group statistics).
        out: a tensor that receives the result; no gradient flows through it.

    Returns:
        ``y``, or ``(y, stream)`` with the residual sum. ``y`` has the dtype that the spec declares for an input of
        x's dtype, also where the stream is wider.

    Raises:
        TypeError, ValueError: as `normkit.reference.normalize`, and where ``residual`` or ``out`` does not fit.

    torch has no one function for all of them; `layer_norm`, `rms_norm`, ... have torch's arguments.
    """
    check_tensors(x=x, weight=weight, bias=bias)
    if residual is None:
        if out is None:
            return compute(x, spec, weight, bias, gate=gate, mask=mask)
        if mask is None and _may_write(out, x, output_dtype(x.dtype, spec, weight, bias), weight, bias, gate):
            written = compute_into(out, x, spec, weight, bias, gate)
            if written:
                return out
        return write(compute(x, spec, weight, bias, gate=gate, mask=mask), out)
    both = None if gate is not None or mask is not None else add_and_compute(x, residual, spec, weight, bias)
    if both is not None:
        return both if out is None else (write(both[0], out), both[1])
    stream = add_residual(x, residual)
    y = compute(stream, spec, weight, bias, gate=gate, mask=mask)
    if spec.output_dtype == "input":
        y = y.to(x.dtype)
    return y if out is None else write(y, out), stream


def _may_write(out: Tensor, x: Tensor, dtype: torch.dtype, *others: Tensor | None) -> bool:
    """Whether an operator may write the result here; `write` words what is wrong."""
    fits = out.shape == x.shape and out.dtype == dtype and out.device == x.device
    return fits and not needs_gradient(out, x, *others)


@functools.lru_cache(maxsize=4096, typed=True)
def _cached_spec(**fields: Any) -> NormSpec:
    return NormSpec(**fields)


def make_spec(**fields: Any) -> NormSpec:
    """A NormSpec, built and checked once for each set of arguments: calls of a function repeat theirs."""
    if torch.compiler.is_compiling():  # traced once; Dynamo does not take cached functions
        return NormSpec(**fields)
    try:
        return _cached_spec(**fields)
    except TypeError:  # an argument that cannot be hashed, or is wrong: NormSpec says what is
        return NormSpec(**fields)


def as_shape(normalized_shape: int | Sequence[int], name: str = "normalized_shape") -> tuple[int, ...]:
    """A shape as torch reads it: an int is one dim."""
    if isinstance(normalized_shape, numbers.Integral | torch.SymInt):
        shape: tuple[Any, ...] = (normalized_shape,)
    elif isinstance(normalized_shape, Sequence) and not isinstance(normalized_shape, str):
        shape = tuple(normalized_shape)
    else:
        raise TypeError(f"{name} must be an integer or a sequence of integers; got {normalized_shape!r}")
    if not shape:
        raise ValueError(f"{name} must name at least one dim; got ()")
    return tuple(n if isinstance(n, torch.SymInt) else check_count(name, n, least=0) for n in shape)  # type: ignore[misc]


def check_tensors(**given: object) -> None:
    """Refuse what is no tensor before anything is asked of it; dtypes and shapes are looked at with the spec."""
    for name, value in given.items():
        if (value is not None and not isinstance(value, Tensor)) or (value is None and name == "x"):
            check_floating(name, value)


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """The residual sum, rounded to the stream's dtype."""
    check_floating("x", x)
    check_floating("residual", residual)
    check_same_device("residual", residual, x)
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}; it must equal input's, {tuple(x.shape)}")
    return (x + residual).to(residual.dtype)


def write(y: Tensor, out: Tensor) -> Tensor:
    """Copy a result to where the caller wants it."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor; got {type(out).__name__} {out!r}")
    if out.shape != y.shape or out.dtype != y.dtype or out.device != y.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; "
            f"the result needs {tuple(y.shape)} {y.dtype} on {y.device}"
        )
    if torch.is_grad_enabled() and (y.requires_grad or out.requires_grad):
        raise ValueError("out= takes no gradient; call under torch.no_grad() or leave out= away")
    return out.copy_(y)
