"""The one place where a norm picks its implementation.

1. `kernels_take` says whether the native operators may see a tensor; `normkit.ops` chooses the form of the operator
   that keeps gradients, compilation and export intact.
2. Else torch's own fused operator, on devices where it computes the same spec.
3. Else the reference, with `ClosedForm` as its gradient. On a CPU that misses its kernels, the first use says why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normkit import ops
from normkit.checks import FLOATS, check_mask
from normkit.ops import fused
from normkit.reference import Measured, Statistics, count_elements, normalize_measured
from normkit.reference_backward import normalize_backward
from normkit.spec import NormSpec

_LOADED = ops.LOADED
_PLAIN = (Tensor, torch.nn.Parameter)
_compiling = torch.compiler.is_compiling
_functorch = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack


def kernels_take(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the native operators may be called on these: plain dense CPU tensors of a dtype that has kernels."""
    if _compiling():
        given = [x, *(t for t in others if t is not None)]
        mine = all(t.is_cpu and t.dtype in FLOATS for t in given)
        return _LOADED and mine and not _functorch() and forward_ad._current_level < 0
    if type(x) not in _PLAIN or not x.is_cpu or x.dtype not in FLOATS or x.layout is not torch.strided:
        return False
    # A TorchDispatchMode is there to see what is computed, and an operator hides it: an audit follows the residual
    # stream through its sums, and an operator that adds and normalizes shows none.
    if _modes() or _functorch() or forward_ad._current_level >= 0:
        return False
    for t in others:
        if t is not None and (type(t) not in _PLAIN or not t.is_cpu or t.dtype not in FLOATS):
            return False
    if not _LOADED:
        ops.warn_once()
    return _LOADED


def compute(
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
    """Evaluate a NormSpec by the implementation that fits.

    Args:
        x, spec, weight, bias, gate, mask, running_mean, running_var: as `normkit.reference.normalize`.
    """
    y = None
    if kernels_take(x, weight, bias, gate, running_mean, running_var):
        mask = _as_boolean(mask, x, spec)
        if running_mean is None:
            run = _cached(ops.operator)(spec)
            y = None if run is None else run(x, weight, bias, gate=gate, mask=mask)
        elif gate is None and running_var is not None:
            run = _cached(ops.given)(spec)
            y = None if run is None else run(x, running_mean, running_var, weight, bias, mask)
    elif gate is None and mask is None and fused_may_run(x):
        y = fused.evaluate(x, spec, weight, bias, running_mean, running_var)
    if y is not None:
        return y
    return _evaluate_plain(x, spec, weight, bias, gate, mask, running_mean, running_var)[0]


def evaluate(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Statistics | None]:
    """`compute`, with the statistics that the input had. No gradient flows through them."""
    if gate is None and kernels_take(x, weight, bias):
        mask = _as_boolean(mask, x, spec)
        run = _cached(ops.measuring)(spec)
        found = None if run is None else run(x, weight, bias, mask)
        if found is not None:
            y, mean, variance, count = found
            shape = [1] * x.dim()
            shape[spec.channel_dim] = mean.shape[-1]  # type: ignore[index]
            if spec.axes == "instance":
                shape[0] = x.shape[0]
            if isinstance(count, Tensor):
                count = count.view([1] * x.dim())
            return y, Statistics(mean.view(shape), variance.view(shape), count)
    return _evaluate_plain(x, spec, weight, bias, gate, mask)


def add_and_compute(
    x: Tensor, residual: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """(norm of the residual sum, the sum) by one operator; None where there is none for it."""
    if not kernels_take(x, weight, bias, residual) or residual.shape != x.shape:
        return None
    return ops.add_and_norm(x, residual, spec, weight, bias)


def compute_into(
    out: Tensor, x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None
) -> bool:
    """Whether an operator wrote the norm into ``out``."""
    if _compiling() or not kernels_take(x, weight, bias, gate):
        return False
    run = ops.operator(spec)
    return run is not None and run(x, weight, bias, gate=gate, out=out) is not None


def _as_boolean(mask: Tensor | None, x: Tensor, spec: NormSpec) -> Tensor | None:
    """A mask as the operators take it."""
    if mask is None or spec.axes == "features" or not isinstance(spec.channel_dim, int) or x.dim() < 2:
        return mask
    check_mask(mask, x, spec.channel_dim)
    return mask if mask.dtype == torch.bool else mask.to(torch.bool)


def fused_may_run(x: Tensor) -> bool:
    """Whether x is on a device that only torch has kernels for, with nothing that wants to see into them."""
    return isinstance(x, Tensor) and not x.is_cpu and not x.is_meta and (_compiling() or not _modes())


def _evaluate_plain(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> tuple[Tensor, Statistics | None]:
    """The reference, with statistics (None where given ones were used).

    `ClosedForm` where a gradient is needed and only reverse-mode autograd watches; all else can trace the reference.
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
    return _compiling() or _functorch() or forward_ad._current_level >= 0


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _cached(function: Any) -> Any:
    """A cached function; itself while a compiler traces, which does not take the cache."""
    return function.__wrapped__ if _compiling() else function


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
