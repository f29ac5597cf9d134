"""How an operator is called, so that no gradient and no transform is ever lost.

1. functorch transforms or forward-mode AD are active: the plain form (a raw operator drops tangents silently);
2. compiling or exporting: an operator with a registered gradient, whose backward is an operator too (else an exported
   model does not train);
3. a gradient is needed: an old-style Function, the cheapest; its backward takes the plain form when it must itself be
   differentiable;
4. else the raw operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function
from torch.autograd import forward_ad as _forward_ad

from normkit.ops import formulas
from normkit.ops import references as ref
from normkit.ops.extension import LOADED, warn_once

_functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor})


def transforms_active() -> bool:
    """Whether functorch or forward-mode AD is at work."""
    return _functorch_active() or _forward_ad._current_level >= 0  # type: ignore[attr-defined]


def native(x: Tensor) -> bool:
    """Whether a kernel may be called on x at all: a plain CPU tensor, no transform, and an extension."""
    if not LOADED:
        if x.is_cpu:
            warn_once()
        return False
    return (
        x.is_cpu and type(x) in _PLAIN_TYPES and not _functorch_active() and _forward_ad._current_level < 0  # type: ignore[attr-defined]
    )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must record an operation on these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _apart(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors, each as a node of its own: one may be another (x its own gate) or be computed from it, and then a
    gradient must not arrive by both ways."""
    return tuple(t.view_as(t) if t is not None and t.requires_grad else t for t in tensors)


def _gradients(y: Tensor, tensors: Sequence[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """Differentiable gradients of y, aligned with ``tensors``."""
    present = [t for t in tensors if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(y, present, grad.to(y.dtype), create_graph=True, allow_unused=True))
    return [next(grads) if t is not None and t.requires_grad else None for t in tensors]


def _make_function(
    name: str,
    outputs: int,
    differentiable: Callable[..., tuple[Any, ...]],
) -> Callable[..., Any]:
    """An old-style Function over one operator that returns the first ``outputs`` of what the operator does."""
    operator = getattr(torch.ops.normkit, name).default
    setup, backward_formula = formulas.GRADIENTS[name]

    def forward(ctx: Any, *inputs: Any) -> Any:
        with _BelowAutograd():  # past the registered gradient, which would cost as much as the kernel of a small row
            output = operator(*inputs)
        setup(ctx, inputs, output)
        if outputs == 1:
            return output if isinstance(output, Tensor) else output[0]
        if len(output) == outputs:  # the statistics are returned
            formulas.mark_statistics(ctx, name, tuple(output))
        return tuple(output[:outputs])

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return differentiable(ctx, *grads)
        saved = ctx.saved_tensors  # not below autograd: unpacking may run code that it must record (a checkpoint's)
        with _BelowAutograd():
            return backward_formula(ctx, saved, *grads)

    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply  # type: ignore[attr-defined]


# ---- differentiable gradients, from what each setup saved ----


def _row_again(plain: Callable[..., Tensor]) -> Callable[..., tuple[Any, ...]]:
    def differentiable(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias, *_ = _apart(*ctx.saved_tensors)
        y = plain(x, weight, bias, ctx.eps, ctx.weight_offset, ctx.gain_in_input, ctx.round_before_gain, ctx.dtype)
        return *_gradients(y, (x, weight, bias), grad), *(None,) * 5

    return differentiable


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _add_again(plain: Callable[..., Tensor]) -> Callable[..., tuple[Any, ...]]:
    def differentiable(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> tuple[Any, ...]:
        total, weight, bias, *_ = _apart(*ctx.saved_tensors)
        d = [None, None, None]
        if grad is not None:
            y = plain(total, weight, bias, ctx.eps, ctx.weight_offset, ctx.gain_in_input, False, _wide(total))
            d = _gradients(y, (total, weight, bias), grad)
        dx = d[0] if grad_sum is None else grad_sum if d[0] is None else d[0] + grad_sum.to(d[0].dtype)
        return None if dx is None else dx.to(ctx.x_dtype), dx, d[1], d[2], *(None,) * 5

    return differentiable


def _gated_again(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, gate, weight, _ = _apart(*ctx.saved_tensors)
    y = ref.gated_rms_norm_reference(x, gate, weight, *ctx.options)
    return *_gradients(y, (x, gate, weight), grad), *(None,) * 6


def _group_again(ctx: Any, grad: Tensor, *statistics: Tensor | None) -> tuple[Any, ...]:
    x, weight, bias, *_ = _apart(*ctx.saved_tensors)
    y = ref.group_norm_reference(x, weight, bias, ctx.groups, ctx.eps)
    return *_gradients(y, (x, weight, bias), grad), None, None


def _batch_train_again(ctx: Any, grad: Tensor | None, *statistics: Tensor | None) -> tuple[Any, ...]:
    x, weight, bias, mask, *_ = _apart(*ctx.saved_tensors)
    if grad is None:
        return (None,) * 5
    y = ref.batch_norm_train_reference(x, weight, bias, mask, ctx.eps)[0]
    return *_gradients(y, (x, weight, bias), grad), None, None


def _batch_frozen_again(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, mean, variance, weight, bias, mask = _apart(*ctx.saved_tensors)
    y = ref.batch_norm_reference(x, mean, variance, weight, bias, mask, ctx.eps)
    dx, dweight, dbias = _gradients(y, (x, weight, bias), grad)
    return dx, None, None, dweight, dbias, None, None


def _channel_layer_again(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, *_ = _apart(*ctx.saved_tensors)
    y = ref.channel_layer_norm_reference(x, weight, bias, ctx.eps)
    return *_gradients(y, (x, weight, bias), grad), None


if LOADED:
    rms_norm_function = _make_function("rms_norm_with_statistics", 1, _row_again(ref.rms_norm_reference))
    layer_norm_function = _make_function("layer_norm_with_statistics", 1, _row_again(ref.layer_norm_reference))
    add_rms_norm_function = _make_function("add_rms_norm_with_statistics", 2, _add_again(ref.rms_norm_reference))
    add_layer_norm_function = _make_function("add_layer_norm_with_statistics", 2, _add_again(ref.layer_norm_reference))
    gated_rms_norm_function = _make_function("gated_rms_norm_with_statistics", 1, _gated_again)
    group_norm_function = _make_function("group_norm_with_statistics", 1, _group_again)
    group_norm_with_statistics_function = _make_function("group_norm_with_statistics", 3, _group_again)
    batch_norm_train_function = _make_function("batch_norm_train", 4, _batch_train_again)
    batch_norm_frozen_function = _make_function("batch_norm_frozen", 1, _batch_frozen_again)
    channel_layer_norm_function = _make_function("channel_layer_norm_with_statistics", 1, _channel_layer_again)
