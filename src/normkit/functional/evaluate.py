"""The one place where a norm picks its implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normkit.reference import Measured, Statistics, count_elements, normalize_measured
from normkit.reference_backward import normalize_backward
from normkit.spec import NormSpec


def evaluate(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> tuple[Tensor, Statistics | None]:
    """Evaluate a NormSpec by the implementation that fits, and say what statistics the input had.

    - functorch transforms, forward-mode AD, compilation and export: the reference, which all of them can trace;
    - a gate, given statistics, or arithmetic that never leaves half precision: the reference;
    - a gradient is needed: `ClosedForm`;
    - else the reference.

    Args:
        x, spec, weight, bias, gate, mask, running_mean, running_var: as `normkit.reference.normalize`.

    Returns:
        The result, and the statistics it was normalized by (None where given ones were used). No gradient flows
        through the statistics.
    """
    plain = gate is None and running_mean is None and spec.rounding != "none" and x.is_floating_point()
    if plain and needs_gradient(x, weight, bias) and not is_transformed():
        y, mean, square = ClosedForm.apply(x, weight, bias, mask, spec)  # type: ignore[misc]
        return y, Statistics(mean, square, count_elements(x, spec, mask))
    y, measured = normalize_measured(x, spec, weight, bias, gate, mask, running_mean, running_var)
    if measured is None:
        return y, None
    mean, square, count = measured.statistics()
    return y, Statistics(mean.detach(), square.detach(), count)


def is_transformed() -> bool:
    """Whether something other than plain reverse-mode autograd watches: torch.func, forward AD, compile or export."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class ClosedForm(torch.autograd.Function):
    """Any NormSpec without gate and given statistics, with `normalize_backward` as its backward.

    Why not plain autograd through the reference: that keeps about five float32 copies of a half-precision x for the
    backward where this keeps x itself; and it sums the gain's gradient in half precision where the spec multiplies in
    half precision (``rounding="before_gain"``). When the backward itself is recorded (double backward), the statistics
    are measured again from x, so that autograd can follow them, any number of times.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, spec: NormSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, measured = normalize_measured(x, spec, weight, bias, mask=mask)
        assert measured is not None
        count = measured.count
        ctx.count = None if isinstance(count, Tensor) else count
        ctx.spec = spec
        kept = (measured.mean, measured.correction, measured.square, count if isinstance(count, Tensor) else None)
        ctx.save_for_backward(x, weight, bias, mask, *kept, measured.scale)
        mean, square, _ = measured.statistics()
        ctx.mark_non_differentiable(mean, square)
        ctx.set_materialize_grads(False)
        return y, mean, square

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return None, None, None, None, None
        x, weight, bias, mask, mean, correction, square, count, scale = ctx.saved_tensors
        measured = None
        if not torch.is_grad_enabled():
            measured = Measured(mean, correction, square, ctx.count if count is None else count, scale)
        needed = ctx.needs_input_grad[:3]
        out = normalize_backward(grads[0], x, ctx.spec, weight, bias, mask=mask, measured=measured, needed=needed)
        return *out, None, None
