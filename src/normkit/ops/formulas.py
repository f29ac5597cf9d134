"""Gradients of the operators, for eager autograd and for compiled and exported graphs.

One pair of functions a family: `setup` keeps what the backward needs, `backward` takes the saved tensors and calls the
backward operator. Eager autograd wraps them in an old-style Function (the fastest there is); `library` registers them
on the operators that compiled and exported graphs hold. Second order goes through the plain form of `references`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.ops import references as ref

_ops = torch.ops.normkit


def mark_statistics(ctx: Any, name: str, output: Any) -> None:
    """Saved statistics carry no gradient: compute them from x where one is wanted."""
    if isinstance(output, tuple) and not name.endswith("_backward"):
        ctx.mark_non_differentiable(*output[2 if name.startswith("add_") else 1 :])


def _kernel_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient in a dtype that the kernel takes beside x: its own or float32."""
    return grad if grad.dtype in (x.dtype, torch.float32) else grad.to(torch.promote_types(grad.dtype, torch.float32))


# ---- rows ----


def _row_setup(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.eps, ctx.weight_offset, ctx.gain_in_input, ctx.round_before_gain, ctx.dtype = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.set_materialize_grads(False)


def _row_grads(
    ctx: Any, grad: Tensor, saved: Sequence[Any], grad_sum: Tensor | None, needs: Sequence[bool]
) -> tuple[Any, ...]:
    """(dx, dweight, dbias) by the backward operator. (Checkpointing lets saved tensors be read only once.)"""
    x, weight, bias, *statistics = saved
    operator = _ops.rms_norm_backward.default if len(statistics) == 1 else _ops.layer_norm_backward.default
    want_weight = needs[1] and weight is not None
    want_bias = needs[2] and bias is not None
    dx, dweight, dbias = operator(
        _kernel_grad(grad, x), x, weight, *statistics, ctx.eps, ctx.weight_offset, ctx.gain_in_input, grad_sum,
        want_weight, bias.dtype if want_bias else None,
    )  # fmt: skip
    return dx, dweight if want_weight else None, dbias if want_bias else None


def _row_backward(ctx: Any, saved: Sequence[Any], grad: Tensor | None, *statistics: Tensor | None) -> tuple[Any, ...]:
    rest = (None,) * 5
    if grad is None:
        return None, None, None, *rest
    return *_row_grads(ctx, grad, saved, None, ctx.needs_input_grad), *rest


def _add_setup(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    (x, residual, weight, bias, ctx.eps, ctx.weight_offset, ctx.gain_in_input, ctx.round_before_gain,
     ctx.dtype) = inputs  # fmt: skip
    ctx.x_dtype, ctx.residual_dtype = x.dtype, residual.dtype
    ctx.save_for_backward(output[1], weight, bias, *output[2:])
    ctx.set_materialize_grads(False)


def _add_backward(
    ctx: Any, saved: Sequence[Any], grad: Tensor | None, grad_sum: Tensor | None, *statistics: Tensor | None
) -> tuple[Any, ...]:
    rest = (None,) * 5
    total = saved[0]
    if grad is None:
        dx, dweight, dbias = grad_sum, None, None
    else:
        if grad_sum is not None and grad_sum.dtype != total.dtype:
            grad_sum = grad_sum.to(total.dtype)
        dx, dweight, dbias = _row_grads(ctx, grad, saved, grad_sum, ctx.needs_input_grad[1:])
    if dx is None:
        return None, None, None, None, *rest
    return dx.to(ctx.x_dtype), dx, dweight, dbias, *rest


def _gated_setup(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    x, gate, weight, *ctx.options = inputs
    ctx.save_for_backward(x, gate, weight, output[1])
    ctx.set_materialize_grads(False)


def _gated_backward(
    ctx: Any, saved: Sequence[Any], grad: Tensor | None, rstd_grad: Tensor | None = None
) -> tuple[Any, ...]:
    rest = (None,) * 6
    if grad is None:
        return None, None, None, *rest
    x, gate, weight, rstd = saved
    eps, weight_offset, gain_in_input, _, silu, gate_before = ctx.options
    want_weight = ctx.needs_input_grad[2] and weight is not None
    dx, dgate, dweight = _ops.gated_rms_norm_backward.default(
        grad, x, gate, weight, rstd, eps, weight_offset, gain_in_input, silu, gate_before, want_weight
    )
    return dx, dgate, dweight if want_weight else None, *rest


# ---- channels ----


def _affine_needs(ctx: Any, first: int, weight: Tensor | None, bias: Tensor | None) -> tuple[bool, torch.dtype | None]:
    want_weight = weight is not None and ctx.needs_input_grad[first]
    want_bias = bias is not None and ctx.needs_input_grad[first + 1]
    return want_weight, bias.dtype if want_bias and bias is not None else None


def _wanted(
    grads: tuple[Tensor, Tensor, Tensor], want_weight: bool, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dx, dweight, dbias = grads
    return dx, dweight if want_weight else None, dbias if bias_dtype is not None else None


def _group_setup(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.groups, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.set_materialize_grads(False)


def _group_backward(ctx: Any, saved: Sequence[Any], grad: Tensor | None, *statistics: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 5
    x, weight, bias, mean, variance = saved
    wants = _affine_needs(ctx, 1, weight, bias)
    grads = _ops.group_norm_backward.default(grad, x, weight, mean, variance, ctx.groups, ctx.eps, *wants)
    return *_wanted(grads, *wants), None, None


def _batch_train_setup(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, mask, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, mask, *output[1:])
    ctx.set_materialize_grads(False)


def _batch_train_backward(
    ctx: Any, saved: Sequence[Any], grad: Tensor | None, *statistics: Tensor | None
) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 5
    x, weight, bias, mask, mean, variance, count = saved
    wants = _affine_needs(ctx, 1, weight, bias)
    grads = _ops.batch_norm_backward.default(grad, x, weight, mean, variance, count, mask, ctx.eps, *wants)
    return *_wanted(grads, *wants), None, None


def _batch_frozen_setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, mean, variance, weight, bias, mask, ctx.eps = inputs
    ctx.save_for_backward(x, mean, variance, weight, bias, mask)


def _batch_frozen_backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Any, ...]:
    x, mean, variance, weight, bias, mask = saved
    wants = _affine_needs(ctx, 3, weight, bias)
    grads = _ops.batch_norm_backward.default(grad, x, weight, mean, variance, None, mask, ctx.eps, *wants)
    dx, dweight, dbias = _wanted(grads, *wants)
    return dx, None, None, dweight, dbias, None, None


def _channel_layer_setup(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.set_materialize_grads(False)


def _channel_layer_backward(
    ctx: Any, saved: Sequence[Any], grad: Tensor | None, *statistics: Tensor | None
) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 4
    x, weight, bias, mean, rstd = saved
    wants = _affine_needs(ctx, 1, weight, bias)
    grads = _ops.channel_layer_norm_backward.default(grad, x, weight, mean, rstd, ctx.eps, *wants)
    return *_wanted(grads, *wants), None


# ---- second order: the gradient of a backward operator, through the plain form ----


def _second_order(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor, wanted: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of (d inputs) with respect to grad and the inputs, given the gradients `wanted` of (d inputs)."""
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        present = [t for t in leaves if t is not None]
        g = grad.detach().requires_grad_()
        y = plain(*leaves)
        first = torch.autograd.grad(y, present, g.to(y.dtype), create_graph=True, allow_unused=True)
    by_input = iter(first)
    firsts = [None if t is None else next(by_input) for t in leaves]
    pairs = [(f, w) for f, w in zip(firsts, wanted, strict=True) if f is not None and w is not None and f.requires_grad]
    if not pairs:
        return [None] * (1 + len(leaves))
    outs, outer = zip(*pairs, strict=True)
    result = iter(torch.autograd.grad(outs, [g, *present], outer, allow_unused=True))
    return [next(result), *(None if t is None else next(result) for t in leaves)]


def _save_all(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.tensor_at = [i for i, v in enumerate(inputs) if isinstance(v, Tensor)]
    ctx.others = [None if isinstance(v, Tensor) else v for v in inputs]
    ctx.save_for_backward(*(inputs[i] for i in ctx.tensor_at))
    ctx.set_materialize_grads(False)


def _saved_all(ctx: Any, saved: Sequence[Any]) -> list[Any]:
    values = list(ctx.others)
    for i, tensor in zip(ctx.tensor_at, saved, strict=True):
        values[i] = tensor
    return values


def _bias_like(dtype: torch.dtype | None, shape: torch.Size, x: Tensor) -> Tensor | None:
    """The backward operators do not take the bias, since no gradient depends on its value: any value will do."""
    return None if dtype is None else x.new_zeros(shape, dtype=dtype)


def _row_second(centered: bool) -> Callable[..., tuple[Any, ...]]:
    plain = ref.layer_norm_reference if centered else ref.rms_norm_reference

    def backward(
        ctx: Any, saved: Sequence[Any], ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None
    ) -> tuple[Any, ...]:
        grad, x, weight, *rest = _saved_all(ctx, saved)
        eps, weight_offset, gain_in_input, _, want_weight, bias_dtype = rest[2 if centered else 1 :]
        bias = _bias_like(bias_dtype, x.shape[-1:] if weight is None else weight.shape, x)
        wanted = (ddx, ddweight if want_weight else None, None if bias is None else ddbias)
        dg, dx, dweight, _ = _second_order(
            lambda x, w, b: plain(x, w, b, eps, weight_offset, gain_in_input), (x, weight, bias), grad, wanted
        )
        none = (None,) * (2 if centered else 1)
        return dg, dx, dweight, *none, None, None, None, ddx if rest[-3] is not None else None, None, None

    return backward


def _gated_second(
    ctx: Any, saved: Sequence[Any], ddx: Tensor | None, ddgate: Tensor | None, ddweight: Tensor | None
) -> tuple[Any, ...]:
    grad, x, gate, weight, _, eps, weight_offset, gain_in_input, silu, before, want_weight = _saved_all(ctx, saved)
    dg, dx, dgate, dweight = _second_order(
        lambda x, z, w: ref.gated_rms_norm_reference(x, z, w, eps, weight_offset, gain_in_input, False, silu, before),
        (x, gate, weight),
        grad,
        (ddx, ddgate, ddweight if want_weight else None),
    )
    return dg, dx, dgate, dweight, *(None,) * 7


def _group_second(
    ctx: Any, saved: Sequence[Any], ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None
) -> tuple[Any, ...]:
    grad, x, weight, _, _, groups, eps, want_weight, bias_dtype = _saved_all(ctx, saved)
    bias = _bias_like(bias_dtype, x.shape[1:2], x)
    wanted = (ddx, ddweight if want_weight else None, None if bias is None else ddbias)
    dg, dx, dweight, _ = _second_order(
        lambda x, w, b: ref.group_norm_reference(x, w, b, groups, eps), (x, weight, bias), grad, wanted
    )
    return dg, dx, dweight, *(None,) * 6


def _batch_second(
    ctx: Any, saved: Sequence[Any], ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None
) -> tuple[Any, ...]:
    grad, x, weight, mean, variance, count, mask, eps, want_weight, bias_dtype = _saved_all(ctx, saved)
    bias = _bias_like(bias_dtype, x.shape[1:2], x)
    wanted = (ddx, ddweight if want_weight else None, None if bias is None else ddbias)

    def plain(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        if count is None:
            return ref.batch_norm_reference(x, mean, variance, w, b, mask, eps)
        return ref.batch_norm_train_reference(x, w, b, mask, eps)[0]

    dg, dx, dweight, _ = _second_order(plain, (x, weight, bias), grad, wanted)
    return dg, dx, dweight, *(None,) * 7


def _channel_layer_second(
    ctx: Any, saved: Sequence[Any], ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None
) -> tuple[Any, ...]:
    grad, x, weight, _, _, eps, want_weight, bias_dtype = _saved_all(ctx, saved)
    bias = _bias_like(bias_dtype, x.shape[1:2], x)
    wanted = (ddx, ddweight if want_weight else None, None if bias is None else ddbias)
    dg, dx, dweight, _ = _second_order(
        lambda x, w, b: ref.channel_layer_norm_reference(x, w, b, eps), (x, weight, bias), grad, wanted
    )
    return dg, dx, dweight, *(None,) * 5


GRADIENTS: dict[str, tuple[Callable[..., None], Callable[..., Any]]] = {
    "rms_norm_with_statistics": (_row_setup, _row_backward),
    "layer_norm_with_statistics": (_row_setup, _row_backward),
    "add_rms_norm_with_statistics": (_add_setup, _add_backward),
    "add_layer_norm_with_statistics": (_add_setup, _add_backward),
    "gated_rms_norm_with_statistics": (_gated_setup, _gated_backward),
    "group_norm_with_statistics": (_group_setup, _group_backward),
    "batch_norm_train": (_batch_train_setup, _batch_train_backward),
    "batch_norm_frozen": (_batch_frozen_setup, _batch_frozen_backward),
    "channel_layer_norm_with_statistics": (_channel_layer_setup, _channel_layer_backward),
    "rms_norm_backward": (_save_all, _row_second(False)),
    "layer_norm_backward": (_save_all, _row_second(True)),
    "gated_rms_norm_backward": (_save_all, _gated_second),
    "group_norm_backward": (_save_all, _group_second),
    "batch_norm_backward": (_save_all, _batch_second),
    "channel_layer_norm_backward": (_save_all, _channel_layer_second),
}
"""Operator: (what it keeps, its gradient)."""
