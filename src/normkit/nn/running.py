"""Running statistics of modules: when a batch counts, what a batch of one does. All that keep some share this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from normkit import ops
from normkit.checks import check_same_device
from normkit.functional import short
from normkit.functional.batch import holds_one, refuse_one, store
from normkit.functional.evaluate import compute, evaluate
from normkit.functional.running import advance, advance_in_place, moments
from normkit.reference import Statistics, align_mask, output_dtype
from normkit.spec import NormSpec

Single = Literal["error", "running", "skip"]
Evaluate = Callable[..., tuple[Tensor, Statistics | None]]
_evaluate = evaluate


class KeepsRunningStatistics(Protocol):
    """A module with torch's three buffers, each a tensor or None."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing computes again what it has seen.

    Compiled code needs no such test: a compiler that recomputes does so after it has taken the updates apart.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def normalize_batch(
    module: KeepsRunningStatistics,
    x: Tensor,
    spec: NormSpec,
    *,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    momentum: float | None = 0.1,
    single: Single = "error",
    skip_nonfinite: bool = False,
    alone: bool | None = None,
    evaluate: Evaluate = evaluate,
) -> Tensor:
    """Normalize by the batch's own statistics and move the module's running ones.

    Args:
        module: holds parameters and buffers.
        x: the input.
        spec: batch or instance statistics.
        gate: as `normkit.functional.norm`.
        mask: valid positions.
        momentum: the weight of this batch; None for a plain average over batches.
        single: what to do with one value per channel: ``"error"``, ``"running"`` (normalize by the running
            statistics, and leave them) or ``"skip"`` (return the input).
        skip_nonfinite: leave the running statistics alone when the batch's are not finite.
        alone: whether the batch holds one value per channel; None: look at x.
        evaluate: what measures and normalizes; another one shares its statistics between processes.

    Returns:
        The result. An empty batch, a recomputed one (activation checkpointing) and a batch that is masked throughout
        leave all three buffers alone.

    Raises:
        ValueError: one value per channel under ``single="error"``, or under ``"running"`` without running statistics.
    """
    own = mask is None and gate is None and evaluate is _evaluate
    if own and not alone and not skip_nonfinite and _is_ordinary(spec) and not recomputing():
        mean, var = module.running_mean, module.running_var
        short_y = short.batch_train(x, mean, var, module.weight, module.bias, momentum, spec.eps)
        if short_y is not None:
            if mean is not None and module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
            return short_y
    if module.running_mean is not None:
        check_same_device("running_mean", module.running_mean, x)
    if alone is None:
        alone = holds_one(x, spec, mask)
    if alone:
        if single == "running" and module.running_mean is not None:
            return normalize_running(module, x, spec, gate=gate, mask=mask)
        if single != "skip":
            refuse_one(x, spec, mask)
        y = x if mask is None else torch.where(align_mask(mask, spec, x.dim()), x, 0)
        return y.to(output_dtype(x.dtype, spec, module.weight, module.bias))
    y, found = evaluate(x, spec, module.weight, module.bias, gate=gate, mask=mask)
    assert found is not None
    empty = found.mean.numel() == 0 or (isinstance(found.count, int) and found.count == 0)
    if module.running_mean is not None and not empty and not recomputing():
        with torch.no_grad():
            counted = spec.axes == "batch" or momentum is None  # torch's instance norms count nothing
            _move(module, found, spec, x.dim(), momentum, skip_nonfinite, counted, masked=mask is not None)
    return y


def normalize_running(
    module: KeepsRunningStatistics, x: Tensor, spec: NormSpec, *, gate: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Normalize by the running statistics."""
    if mask is None and gate is None and _is_ordinary(spec):
        y = short.batch(x, module.running_mean, module.running_var, module.weight, module.bias, spec.eps)
        if y is not None:
            return y
    return compute(
        x,
        spec,
        module.weight,
        module.bias,
        gate=gate,
        mask=mask,
        running_mean=module.running_mean,
        running_var=module.running_var,
    )


def _is_ordinary(spec: NormSpec) -> bool:
    """Whether this is a batch norm over dim 1 that a kernel computes just so; not asked where a compiler traces."""
    return (
        not torch.compiler.is_compiling()
        and spec.axes == "batch"
        and spec.channel_dim == 1
        and spec.weight_offset == 0
        and ops.measuring(spec) is not None
    )


def check_single(single: str) -> Single:
    """Validate a policy for one-sample batches."""
    if single not in get_args(Single):
        raise ValueError(f"single must be one of {', '.join(map(repr, get_args(Single)))}; got {single!r}")
    return single  # type: ignore[return-value]


def check_momentum(momentum: float | None) -> float | None:
    """Validate a momentum: None is a plain average over batches."""
    if momentum is not None and (isinstance(momentum, bool) or not isinstance(momentum, float | int)):
        raise TypeError(f"momentum must be a number, or None for a plain average over batches; got {momentum!r}")
    if momentum is not None and not 0 <= momentum <= 1:
        raise ValueError(f"momentum must be in [0, 1], or None for a plain average over batches; got {momentum!r}")
    return momentum


def _move(
    module: KeepsRunningStatistics,
    found: Statistics,
    spec: NormSpec,
    ndim: int,
    momentum: float | None,
    skip_nonfinite: bool,
    count: bool,
    *,
    masked: bool,
) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    tracked = module.num_batches_tracked
    step: float | Tensor = 0.0 if momentum is None else momentum
    if momentum is None and tracked is not None:
        step = 1 / (tracked + 1).to(torch.promote_types(module.running_mean.dtype, torch.float32))
    counted: Tensor | bool = True
    if not skip_nonfinite and advance_in_place(module.running_mean, module.running_var, found, spec, step):
        if masked and isinstance(found.count, Tensor):
            counted = found.count.flatten()[0] > 0
    else:
        batch = moments(found, spec, ndim)
        mean, var, counted = advance(
            module.running_mean, module.running_var, batch, step, skip_nonfinite=skip_nonfinite
        )
        store(module.running_mean, mean)
        store(module.running_var, var)
    if tracked is not None and count:
        tracked.add_(counted)
