"""batch_norm and instance_norm, and batch_norm_functional, which returns its running statistics."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from normkit.checks import check_floating, check_mask, check_number, check_same_device
from normkit.functional import short
from normkit.functional.core import add_residual, check_tensors, make_spec, write
from normkit.functional.evaluate import compute, evaluate
from normkit.functional.running import advance, advance_in_place, moments
from normkit.spec import Axes, Gate, NormSpec, OutputDtype, Rounding, check_eps


class BatchNormResult(NamedTuple):
    """What `batch_norm_functional` returns."""

    output: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "after_gain",
    output_dtype: OutputDtype = "input",
    channel_dim: int = 1,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_kind: Gate = ("silu", "after"),
    out: Tensor | None = None,
    skip_nonfinite: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167).

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``, mean and biased variance per channel over
    all other dims; in evaluation the running ones. Training moves ``running`` to ``(1 - momentum) * running + momentum
    * batch`` in place, with the unbiased variance.

    Args:
        input: ``(N, C)`` or ``(N, C, ...)``; ``(N, ..., C)`` with ``channel_dim=-1``.
        running_mean: ``(C,)``, or None (in training) to keep none.
        running_var: ``(C,)``, or None.
        weight: gain ``(C,)`` or None.
        bias: ``(C,)`` or None.
        training: whether to use (and accumulate) the batch's statistics.
        momentum: the weight of the new batch.
        eps: added to the variance.
        mask: input's shape without the channel dim, True (or 1) at valid positions. Others do not count, have output
            zero and get no gradient.
        weight_offset: added to the stored gain.
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        output_dtype: ``"input"``, ``"promoted"`` or ``"weight"``; see `normkit.NormSpec`.
        channel_dim: 1 or -1.
        residual: added first; then ``(y, stream)`` is returned.
        gate: multiplies as ``gate_kind`` says.
        gate_kind: (``"silu"`` or ``"sigmoid"``, ``"before"`` or ``"after"``).
        out: receives the result.
        skip_nonfinite: leave the running statistics alone when the batch's are not finite.

    Returns:
        The result, or ``(y, stream)`` with ``residual``.

    Raises:
        ValueError: a shape, eps or device that does not fit; one value per channel in training; no statistics in
            evaluation. The message names argument, values and fix.
        TypeError: integer input.

    Differs from `torch.nn.functional.batch_norm`: any pair of input and parameter dtypes; the variance does not lose
    digits for a large mean; an empty batch leaves the running statistics alone; a negative eps is refused.
    """
    ordinary = mask is None and residual is None and gate is None and out is None and not skip_nonfinite
    if ordinary and short.as_torch(weight_offset, rounding, output_dtype, channel_dim):
        if training:
            y = short.batch_train(input, running_mean, running_var, weight, bias, momentum, eps)
        else:
            y = short.batch(input, running_mean, running_var, weight, bias, eps)
        if y is not None:
            return y
    stream = None if residual is None else add_residual(input, residual)
    result = _batch_norm(
        input if stream is None else stream, running_mean, running_var, weight, bias, training, momentum, eps, mask,
        weight_offset, rounding, output_dtype, channel_dim, gate, gate_kind, skip_nonfinite, in_place=True,
    )  # fmt: skip
    if training:
        store(running_mean, result.running_mean)
        store(running_var, result.running_var)
    return _finish(result.output, input, stream, output_dtype, out)


def batch_norm_functional(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "after_gain",
    output_dtype: OutputDtype = "input",
    channel_dim: int = 1,
    gate: Tensor | None = None,
    gate_kind: Gate = ("silu", "after"),
    skip_nonfinite: bool = False,
) -> BatchNormResult:
    """Batch normalization that changes nothing in place: for `torch.func` transforms and functional training loops.

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``, with the shapes and errors of `batch_norm`.

    Args:
        input, running_mean, running_var, weight, bias, training, momentum, eps: as `batch_norm`.
        mask, weight_offset, rounding, output_dtype, channel_dim, gate, gate_kind, skip_nonfinite: as `batch_norm`.

    Returns:
        ``(output, running_mean, running_var)``: the running statistics after this batch (those given, in evaluation).

    Raises:
        TypeError, ValueError: as `batch_norm`.

    Differs from `torch.nn.functional.batch_norm`: under ``vmap``, ``jvp`` and ``jacrev`` that one's in-place update
    of an unbatched buffer is an error.
    """
    return _batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps, mask, weight_offset, rounding,
        output_dtype, channel_dim, gate, gate_kind, skip_nonfinite, in_place=False,
    )  # fmt: skip


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    mask: Tensor | None,
    weight_offset: float,
    rounding: Rounding,
    output_dtype: OutputDtype,
    channel_dim: int,
    gate: Tensor | None,
    gate_kind: Gate,
    skip_nonfinite: bool,
    *,
    in_place: bool,
) -> BatchNormResult:
    """`batch_norm_functional`; ``in_place`` allows the running statistics to be moved where they are."""
    check_floating("input", input)
    _check_running(input, running_mean, running_var, training, momentum)
    check_eps(eps)
    if training:
        check_positive_eps(eps)
    if input.dim() == 1 and input.numel() == 0:  # torch's own smallest empty batch: no samples, no channels
        return BatchNormResult(input.clone(), running_mean, running_var)
    spec = _spec("batch", channel_dim, eps, weight, bias, weight_offset, rounding, output_dtype, gate, gate_kind)
    if not training:
        y = compute(input, spec, weight, bias, gate=gate, mask=mask, running_mean=running_mean, running_var=running_var)
        return BatchNormResult(y, running_mean, running_var)
    check_more_than_one(input, spec, mask)
    return _measured(input, spec, weight, bias, gate, mask, running_mean, running_var, momentum, skip_nonfinite,
                     in_place=in_place)  # fmt: skip


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "after_gain",
    output_dtype: OutputDtype = "input",
    channel_dim: int = 1,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_kind: Gate = ("silu", "after"),
    out: Tensor | None = None,
    skip_nonfinite: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Instance normalization (Ulyanov et al. 2016, arXiv:1607.08022).

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``, mean and biased variance per sample and
    channel over space. Given running statistics are moved in place towards the average over samples, or used as they
    are where ``use_input_stats=False``.

    Args:
        input: ``(N, C, ...)`` with at least one dim of space; ``(N, ..., C)`` with ``channel_dim=-1``.
        running_mean: ``(C,)`` or None.
        running_var: ``(C,)`` or None.
        weight: gain ``(C,)`` or None.
        bias: ``(C,)`` or None.
        use_input_stats: whether to normalize by the input's own statistics.
        momentum: the weight of the new batch in the running statistics.
        eps: added to the variance.
        mask: input's shape without the channel dim, True (or 1) at valid positions. Others do not count, have output
            zero and get no gradient.
        weight_offset, rounding, output_dtype, channel_dim: as `batch_norm`.
        residual, gate, gate_kind, out, skip_nonfinite: as `batch_norm`.

    Returns:
        The result, or ``(y, stream)`` with ``residual``.

    Raises:
        ValueError: a shape, eps or device that does not fit; one element of space; no statistics to use. The message
            names argument, values and fix.
        TypeError: integer input.

    Differs from `torch.nn.functional.instance_norm`: any pair of input and parameter dtypes; the variance does not
    lose digits for a large mean; channels_last input gives channels_last output; a negative eps is refused.
    """
    ordinary = mask is None and residual is None and gate is None and out is None and use_input_stats
    if ordinary and short.as_torch(weight_offset, rounding, output_dtype, channel_dim):
        y = short.instance(input, weight, bias, eps) if running_mean is None and running_var is None else None
        if y is not None:
            return y
    check_floating("input", input)
    _check_running(input, running_mean, running_var, use_input_stats, momentum)
    check_eps(eps)
    stream = None if residual is None else add_residual(input, residual)
    x = input if stream is None else stream
    spec = _spec("instance", channel_dim, eps, weight, bias, weight_offset, rounding, output_dtype, gate, gate_kind)
    if use_input_stats:
        check_more_than_one(x, spec, mask)
        y, new_mean, new_var = _measured(
            x, spec, weight, bias, gate, mask, running_mean, running_var, momentum, skip_nonfinite
        )
        store(running_mean, new_mean)
        store(running_var, new_var)
    else:
        y = compute(x, spec, weight, bias, gate=gate, mask=mask, running_mean=running_mean, running_var=running_var)
    return _finish(y, input, stream, output_dtype, out)


def check_positive_eps(eps: float) -> None:
    """As torch, a batch norm in training refuses eps = 0: a channel that is constant over the batch gives NaN."""
    if eps == 0:
        raise ValueError(f"eps must be positive in training; got {eps!r}. Give one such as 1e-12, or evaluate")


def check_more_than_one(x: Tensor, spec: NormSpec, mask: Tensor | None) -> None:
    """Refuse statistics of a single value: its variance is 0, so that the output would be the bias."""
    if holds_one(x, spec, mask):
        refuse_one(x, spec, mask)


def refuse_one(x: Tensor, spec: NormSpec, mask: Tensor | None) -> NoReturn:
    """The error of `check_more_than_one`."""
    kind = "channel" if spec.axes == "batch" else "sample and channel"
    raise ValueError(
        f"expected more than 1 value per {kind} when the input's own statistics are used; got input of shape "
        f"{tuple(x.shape)}{'' if mask is None else f' with {int(mask.sum())} valid positions'}. "
        "Use a larger batch, use running statistics, or give a module single='running' or 'skip'"
    )


def holds_one(x: Tensor, spec: NormSpec, mask: Tensor | None) -> bool:
    """Whether each statistic is over one value. (With a mask: whether the whole batch has one valid position; not
    looked at where the mask's values are not to be had, under compilation and transforms.)"""
    if x.dim() < 2 or x.numel() == 0:
        return False
    assert isinstance(spec.channel_dim, int)
    if mask is not None:
        check_mask(mask, x, spec.channel_dim)
    channels = x.shape[spec.channel_dim] * (x.shape[0] if spec.axes == "instance" else 1)
    if x.numel() == channels:
        return True
    if mask is None or spec.axes != "batch" or torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active() and int(mask.sum()) == 1


def store(buffer: Tensor | None, value: Tensor | None) -> None:
    """Write a new running statistic into its buffer."""
    if buffer is not None and value is not None and buffer is not value:
        with torch.no_grad():
            buffer.copy_(value)


def _measured(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    mask: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    skip_nonfinite: bool,
    *,
    in_place: bool = False,
) -> BatchNormResult:
    """Normalize by the input's own statistics; the running ones after it, out of place if not ``in_place``."""
    if running_mean is None or running_var is None or x.numel() == 0:
        y = compute(x, spec, weight, bias, gate=gate, mask=mask)
        return BatchNormResult(y, running_mean, running_var)
    y, found = evaluate(x, spec, weight, bias, gate=gate, mask=mask)
    assert found is not None
    if not skip_nonfinite and spec.axes == "batch":
        moved = (running_mean, running_var) if in_place else (running_mean.clone(), running_var.clone())
        if advance_in_place(*moved, found, spec, momentum):
            return BatchNormResult(y, *moved)
    new = advance(running_mean, running_var, moments(found, spec, x.dim()), momentum, skip_nonfinite=skip_nonfinite)
    return BatchNormResult(y, new[0], new[1])


def _spec(
    axes: Axes,
    channel_dim: int,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    rounding: Rounding,
    output_dtype: OutputDtype,
    gate: Tensor | None,
    gate_kind: Gate,
) -> NormSpec:
    check_tensors(weight=weight, bias=bias)
    return make_spec(
        axes=axes,
        channel_dim=channel_dim,
        eps=eps,
        has_weight=weight is not None,
        weight_offset=weight_offset if weight is not None else 0.0,
        has_bias=bias is not None,
        rounding=rounding,
        output_dtype=output_dtype,
        gate=None if gate is None else gate_kind,
    )


def _check_running(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, own: bool, momentum: float | Tensor
) -> None:
    if (running_mean is None) != (running_var is None):
        given = "running_mean" if running_var is None else "running_var"
        raise ValueError(f"running_mean and running_var go together; only {given} was given")
    if running_mean is None and not own:
        raise ValueError("running_mean and running_var are None; give both, or use the input's own statistics")
    for name, buffer in (("running_mean", running_mean), ("running_var", running_var)):
        if buffer is None:
            continue
        check_floating(name, buffer)
        check_same_device(name, buffer, x)
    if running_mean is not None and own and not isinstance(momentum, Tensor):
        if momentum is None:
            raise TypeError("momentum must be a number; got None. For a plain average give 1 / (batches so far)")
        check_number("momentum", momentum)


def _finish(
    y: Tensor, x: Tensor, stream: Tensor | None, output_dtype: OutputDtype, out: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    if stream is not None and output_dtype == "input":
        y = y.to(x.dtype)
    y = y if out is None else write(y, out)
    return y if stream is None else (y, stream)
