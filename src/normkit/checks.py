"""Argument checks: each raises ValueError or TypeError with the argument's name, its value and what to do."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from normkit.spec import NormSpec

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_floating(name: str, value: object) -> None:
    """A tensor of a dtype that norms are defined for."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(value).__name__} {value!r}")
    if value.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"{name} must be dense; got layout {value.layout}. Convert it first, with {name}.to_dense().")
    if value.dtype not in FLOATS:
        wanted = "float16, bfloat16, float32 or float64" if value.is_floating_point() else "floating point"
        raise TypeError(
            f"{name} must be {wanted}; got {value.dtype}. Convert it first, for example with {name}.float()."
        )


def check_dtype(dtype: torch.dtype | None) -> None:
    """A dtype that parameters can have."""
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"dtype must be float16, bfloat16, float32, float64 or None; got {dtype!r}")


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """An integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer; got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return int(value)


def check_number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {type(value).__name__} {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be finite and in [{low}, {high}]; got {value!r}")
    return float(value)


def check_same_device(name: str, value: Tensor, x: Tensor) -> None:
    """A tensor beside x."""
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device} but x is on {x.device}; move one of them")


def check_mask(mask: object, x: Tensor, channel_dim: int) -> None:
    """x's shape without its channels, and nothing but 0 and 1: an additive mask (0 and -inf) would be read reversed.

    The values are looked at where they are not boolean and are to be had (not under compilation or transforms).
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor; got {type(mask).__name__} {mask!r}")
    needed = tuple(n for d, n in enumerate(x.shape) if d != channel_dim % x.dim())
    if tuple(mask.shape) != needed:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; x of shape {tuple(x.shape)} needs {needed}")
    check_same_device("mask", mask, x)
    if mask.dtype == torch.bool:
        return
    if mask.is_complex():
        raise TypeError(f"mask must be boolean, or 1 and 0; got {mask.dtype}")
    if type(mask) is not Tensor or mask.is_meta or torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active() or mask.numel() == 0:
        return
    with torch.no_grad():
        odd = ((mask != 0) & (mask != 1)).flatten()
        if bool(odd.any()):
            value = mask.flatten()[odd.to(torch.uint8).argmax()].item()
            raise ValueError(
                f"mask must be True or 1 at valid positions and False or 0 elsewhere; got {value}. "
                "Of an additive mask (0 and -inf) give mask == 0"
            )


def check_arguments(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    mask: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> None:
    """Whether these tensors fit the spec and one another."""
    check_floating("x", x)
    shape = feature_shape(x, spec)
    if spec.groups > 1 and shape[0] % spec.groups:
        raise ValueError(f"groups={spec.groups} does not divide the {shape[0]} features of x, shape {tuple(x.shape)}")
    for name, parameter, wanted in (("weight", weight, spec.has_weight), ("bias", bias, spec.has_bias)):
        if (parameter is not None) != wanted:
            raise ValueError(f"{name} is {'missing' if wanted else 'given'}, but the spec has has_{name}={wanted}")
        if parameter is not None:
            check_floating(name, parameter)
            check_same_device(name, parameter, x)
    if weight is not None:
        _check_weight(weight, spec, shape, x)
    like_weight = spec.weight_shape == "per_head" and bias is not None and weight is not None
    if bias is not None and tuple(bias.shape) != shape and not (like_weight and bias.shape == weight.shape):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; x of shape {tuple(x.shape)} needs {shape}")
    if (gate is not None) != (spec.gate is not None):
        raise ValueError(f"gate is {'given' if gate is not None else 'missing'}, but the spec has gate={spec.gate}")
    if gate is not None:
        check_floating("gate", gate)
        check_same_device("gate", gate, x)
        if gate.shape != x.shape:
            raise ValueError(f"gate has shape {tuple(gate.shape)}; it must equal x's, {tuple(x.shape)}")
    if mask is not None:
        if spec.axes == "features":
            raise ValueError("mask has no meaning for axes='features': each position has its own statistic")
        assert isinstance(spec.channel_dim, int)
        check_mask(mask, x, spec.channel_dim)
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must be given together")
    if running_mean is not None and running_var is not None:
        if spec.axes not in ("batch", "instance"):
            raise ValueError(f"running statistics need axes='batch' or 'instance'; the spec has {spec.axes!r}")
        for name, buffer in (("running_mean", running_mean), ("running_var", running_var)):
            check_floating(name, buffer)
            check_same_device(name, buffer, x)
            if tuple(buffer.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(buffer.shape)}; x of shape {tuple(x.shape)} needs {shape}")


def feature_shape(x: Tensor, spec: NormSpec) -> tuple[int, ...]:
    """The shape of the features (or channels) of x; ValueError where x has too few dims for the spec."""
    if isinstance(spec.channel_dim, tuple):
        needed = len(spec.channel_dim)
    else:
        needed = 2 if spec.channel_dim == 1 or spec.axes != "features" else 1
    if x.dim() < needed:
        raise ValueError(f"x has shape {tuple(x.shape)}; axes={spec.axes!r} with channel_dim={spec.channel_dim} "
                         f"needs at least {needed} dims")  # fmt: skip
    if isinstance(spec.channel_dim, tuple):
        return tuple(x.shape[-needed:])
    return (x.shape[spec.channel_dim],)


def _check_weight(weight: Tensor, spec: NormSpec, shape: tuple[int, ...], x: Tensor) -> None:
    if spec.weight_shape == "scalar":
        ok = weight.numel() == 1 and weight.dim() <= 1
    elif spec.weight_shape == "per_head":
        ok = 2 <= weight.dim() <= x.dim() and weight.shape[-1] == shape[0]
        ok = ok and all(w in (1, n) for w, n in zip(reversed(weight.shape), reversed(x.shape), strict=False))
    else:
        ok = tuple(weight.shape) == shape
    if not ok:
        broadcasting = f"(..., heads, {shape[0]}) that broadcasts against x"
        needs = {"scalar": "() or (1,)", "per_head": broadcasting, "features": str(shape)}[spec.weight_shape]
        raise ValueError(f"weight has shape {tuple(weight.shape)}; x of shape {tuple(x.shape)} needs {needs}")
