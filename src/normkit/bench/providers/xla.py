"""JAX: jitted functions as its users write them, statistics in float32; gradients by ``jax.vjp``.

Arrays are row-major, so a channels-last case is an (N, H, W, C) array. Preallocated cases donate the last call's
output, so that the next one is written there. XLA's thread pool has as many threads as the process had processors when
it started.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from normkit.bench.grid import EPS, HEAD, MOMENTUM, RMS_EPS, ROW_NORMS, Case, Inputs, groups_of
from normkit.bench.providers.step import Step, as_array, as_image


@cache
def _jax() -> Any:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # no hop to another thread before a call's work begins
    return jax


def _form(case: Case) -> Callable[..., tuple[Any, ...]]:
    """The norm as a function of the case's arguments: its outputs, and for batch norm the new running statistics."""
    jax = _jax()
    jnp = jax.numpy
    channel = -1 if case.channels_last or case.norm in ROW_NORMS else 1

    def along(v: Any, x: Any) -> Any:
        shape = [1] * x.ndim
        shape[channel] = -1
        return v.astype(jnp.float32).reshape(shape)

    def standardize(x: Any, axes: Any, eps: float, centered: bool = True) -> Any:
        h = x.astype(jnp.float32)
        h = h - jnp.mean(h, axes, keepdims=True) if centered else h
        return h * jax.lax.rsqrt(jnp.mean(h * h, axes, keepdims=True) + eps)

    def affine(h: Any, x: Any, w: Any, b: Any) -> Any:
        return (h * along(w, x) + along(b, x)).astype(x.dtype)

    def space(x: Any) -> tuple[int, ...]:
        return (1, 2) if case.channels_last else tuple(range(2, x.ndim))

    def rms(x: Any, w: Any) -> Any:
        return (standardize(x, -1, RMS_EPS, centered=False) * w.astype(jnp.float32)).astype(x.dtype)

    def add_rms(x: Any, residual: Any, w: Any) -> tuple[Any, ...]:
        total = x + residual
        return rms(total, w), total

    def gated(x: Any, gate: Any, w: Any) -> tuple[Any, ...]:
        h = standardize(x, -1, RMS_EPS, centered=False) * w.astype(jnp.float32)
        return ((h * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype),)

    def group(x: Any, w: Any, b: Any) -> tuple[Any, ...]:
        g = groups_of(x.shape[channel])
        split = (*x.shape[:-1], g, -1) if case.channels_last else (x.shape[0], g, -1, *x.shape[2:])
        axes = (1, 2, 4) if case.channels_last else (2, 3, 4)
        return (affine(standardize(x.reshape(split), axes, EPS).reshape(x.shape), x, w, b),)

    def batch_train(x: Any, w: Any, b: Any, mean: Any, var: Any) -> tuple[Any, ...]:
        axes = tuple(a for a in range(x.ndim) if a != channel % x.ndim)
        h = x.astype(jnp.float32)
        m = jnp.mean(h, axes, keepdims=True)
        v = jnp.mean((h - m) ** 2, axes, keepdims=True)
        count = x.size / x.shape[channel]
        new = [
            (1 - MOMENTUM) * old + (MOMENTUM * now.reshape(-1)).astype(old.dtype)
            for old, now in ((mean, m), (var, v * (count / (count - 1))))
        ]
        return affine((h - m) * jax.lax.rsqrt(v + EPS), x, w, b), *new

    def batch(x: Any, w: Any, b: Any, mean: Any, var: Any) -> tuple[Any, ...]:
        h = (x.astype(jnp.float32) - along(mean, x)) * jax.lax.rsqrt(along(var, x) + EPS)
        return (affine(h, x, w, b),)

    forms: dict[str, Callable[..., tuple[Any, ...]]] = {
        "layer_norm": lambda x, w, b: (affine(standardize(x, -1, EPS), x, w, b),),
        "rms_norm": lambda x, w: (rms(x, w),),
        "add_rms_norm": add_rms,
        "gated_rms_norm": gated,
        "qk_rms_norm": lambda x, w: (rms(x, w),),
        "group_norm": group,
        "instance_norm": lambda x, w, b: (affine(standardize(x, space(x), EPS), x, w, b),),
        "batch_norm_train": batch_train,
        "batch_norm": batch,
        "channel_layer_norm": lambda x, w, b: (affine(standardize(x, channel, EPS), x, w, b),),
    }
    return forms[case.norm]


def _array(case: Case, t: Tensor) -> Any:
    """A copy of a tensor that JAX owns, in its own layout."""
    return _jax().dlpack.from_dlpack(as_array(case, t).contiguous(), copy=True)


def make(case: Case, inputs: Inputs) -> Step | None:
    """All cases; a preallocated one only where XLA does write into the donated memory."""
    jax = _jax()
    form = _form(case)
    outputs = 2 if case.norm == "add_rms_norm" else 1
    arrays = [_array(case, inputs.packed if name == "x" else getattr(inputs, name)) for name in case.arguments]

    def unpack(x: Any) -> Any:
        width = case.shape[-1]
        return x[:, :width].reshape(x.shape[0], -1, HEAD) if case.norm == "qk_rms_norm" else x

    def forward(x: Any, *rest: Any) -> tuple[Any, ...]:
        return form(unpack(x), *rest)

    def train(grads: Any, x: Any, *rest: Any) -> tuple[Any, ...]:
        args = (unpack(x), *rest)
        leaves, statistics = args[: len(case.leaves)], args[len(case.leaves) :]

        def results(*leaves: Any) -> Any:
            found = form(*leaves, *statistics)
            return found[:outputs], found[outputs:]

        found, back, more = jax.vjp(results, *leaves, has_aux=True)
        return *found, *back(grads), *more

    def read(result: tuple[Any, ...]) -> tuple[Tensor, ...]:
        wanted = outputs + (len(case.leaves) if case.mode == "train" else 0)
        return tuple(as_image(case, torch.from_dlpack(a)) for a in result[:wanted])

    if case.mode == "preallocated":
        return _donating(forward, arrays, outputs, read)
    if case.mode == "train":
        grads = tuple(_array(case, g) for g in inputs.grads(case))
        compiled = jax.jit(train).lower(grads, *arrays).compile()
        return Step(lambda: _wait(compiled(grads, *arrays)), read)
    compiled = jax.jit(forward).lower(*arrays).compile()
    return Step(lambda: _wait(compiled(*arrays)), read)


def _wait(result: tuple[Any, ...]) -> tuple[Any, ...]:
    for array in result:
        array.block_until_ready()
    return result


def _donating(forward: Callable[..., Any], arrays: list[Any], outputs: int, read: Callable[[Any], Any]) -> Step | None:
    jax = _jax()
    held = tuple(jax.numpy.zeros(s.shape, s.dtype) for s in jax.eval_shape(forward, *arrays))

    def into(given: tuple[Any, ...], *args: Any) -> tuple[Any, ...]:
        return forward(*args)

    compiled = jax.jit(into, donate_argnums=0, keep_unused=True).lower(held, *arrays).compile()

    def call() -> tuple[Any, ...]:
        nonlocal held
        held = _wait(compiled(held, *arrays))
        return held

    def places() -> list[int]:
        return [a.unsafe_buffer_pointer() for a in call()[:outputs]]

    return Step(call, read) if places() == places() else None
