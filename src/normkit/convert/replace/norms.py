"""One norm module in another's place, with its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.identify import Identification
from normkit.nn import DynamicTanh, GroupNorm, SyncBatchNorm, build, convert_sync_batchnorm, revert_sync_batchnorm
from normkit.spec import NormSpec


class Irreplaceable(Exception):
    """Why a norm stays; shown to the user."""


@dataclass(frozen=True)
class Options:
    """What a conversion may need beside the norm."""

    groups: int
    alpha: float
    process_group: Any


Converter = Callable[[nn.Module, Identification, tuple[int, ...], Options], tuple[nn.Module, str]]


def held(module: nn.Module, path: str | None) -> Tensor | None:
    """A tensor of a module by its path."""
    if path is None:
        return None
    owner, _, key = path.rpartition(".")
    return getattr(module.get_submodule(owner), key)


def carry(new: nn.Module, old: nn.Module, found: Identification, *, statistics: bool = False) -> nn.Module:
    """Give a new norm the old one's tensors, the same objects."""
    for key in ("weight", "bias"):
        tensor = held(old, getattr(found, key))
        if tensor is not None:
            new._parameters[key] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)
    if statistics:
        for key in ("running_mean", "running_var"):
            tensor = held(old, getattr(found, key))
            if tensor is not None:
                new._buffers[key] = tensor
    return new


def divisor(channels: int, groups: int, space: int) -> int:
    """The largest number of groups, at most ``groups``, that divides the channels and leaves no set of one element."""
    fits = (n for n in range(min(groups, channels), 0, -1) if channels % n == 0 and channels // n * space > 1)
    return next(fits, 1)


def _spec(found: Identification) -> NormSpec:
    assert found.spec is not None
    return found.spec


def _like(old: nn.Module) -> dict[str, Any]:
    tensor = next((t for t in (*old.parameters(), *old.buffers()) if t.is_floating_point()), None)
    return {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}


def _features(spec: NormSpec, shape: tuple[int, ...]) -> int | tuple[int, ...]:
    if isinstance(spec.channel_dim, tuple):
        return tuple(shape[d] for d in spec.channel_dim)
    return shape[spec.channel_dim]


def _check_batch(spec: NormSpec) -> int:
    if spec.axes != "batch" or not isinstance(spec.channel_dim, int):
        raise Irreplaceable("its statistics are not of one channel over the batch")
    return spec.channel_dim


def _to_group(old: nn.Module, found: Identification, shape: tuple[int, ...], options: Options) -> tuple[nn.Module, str]:
    spec = _spec(found)
    dim = _check_batch(spec)
    if spec.eps_at != "variance":
        raise Irreplaceable(f"its eps enters at {spec.eps_at!r}, a GroupNorm's at the variance")
    channels = shape[dim]
    space = math.prod(shape[1:]) // max(channels, 1)
    groups = divisor(channels, options.groups, space)
    new = GroupNorm(
        groups, channels, spec.eps, spec.has_weight, bias=spec.has_bias, weight_offset=spec.weight_offset,
        rounding=spec.rounding, channel_dim=dim, **_like(old),
    )  # fmt: skip
    return carry(new, old, found), f"BatchNorm to GroupNorm of {groups} groups ({channels} channels)"


def _to_sync(old: nn.Module, found: Identification, shape: tuple[int, ...], options: Options) -> tuple[nn.Module, str]:
    if isinstance(old, SyncBatchNorm):
        raise Irreplaceable("it is a SyncBatchNorm already")
    try:
        new = convert_sync_batchnorm(old, options.process_group)
    except ValueError as error:
        raise Irreplaceable(str(error)) from error
    if new is old:
        raise Irreplaceable(f"{type(old).__name__} is no batch norm of torch.nn or normkit.nn")
    return new, "BatchNorm to SyncBatchNorm"


def _from_sync(
    old: nn.Module, found: Identification, shape: tuple[int, ...], options: Options
) -> tuple[nn.Module, str]:
    new = revert_sync_batchnorm(old)
    if new is old:
        raise Irreplaceable("it is no SyncBatchNorm")
    return new, f"SyncBatchNorm to {type(new).__name__}"


def _to_frozen(
    old: nn.Module, found: Identification, shape: tuple[int, ...], options: Options
) -> tuple[nn.Module, str]:
    spec = _spec(found)
    dim = _check_batch(spec)
    if spec.frozen:
        raise Irreplaceable("it is frozen already")
    if found.running_mean is None or found.running_var is None:
        raise Irreplaceable("it keeps no running statistics to fix")
    new = build(spec.replace(running=None, frozen=True), shape[dim], **_like(old))
    return carry(new, old, found, statistics=True), "BatchNorm to its stored statistics"


def _to_rms(old: nn.Module, found: Identification, shape: tuple[int, ...], options: Options) -> tuple[nn.Module, str]:
    spec = _spec(found)
    new = build(spec.replace(centered=False), _features(spec, shape), heads=_heads(spec, old, found), **_like(old))
    return carry(new, old, found), "LayerNorm to RMSNorm"


def _heads(spec: NormSpec, old: nn.Module, found: Identification) -> tuple[int, ...] | None:
    weight = held(old, found.weight)
    return None if spec.weight_shape != "per_head" or weight is None else tuple(weight.shape[:-1])


def _to_tanh(old: nn.Module, found: Identification, shape: tuple[int, ...], options: Options) -> tuple[nn.Module, str]:
    spec = _spec(found)
    if spec.gate is not None or spec.weight_shape != "features":
        raise Irreplaceable("DynamicTanh has one gain a feature and no gate")
    affine = spec.has_weight or spec.has_bias
    new = DynamicTanh(
        _features(spec, shape), affine, spec.has_bias, alpha_init=options.alpha,
        channel_dim=spec.channel_dim if isinstance(spec.channel_dim, int) else -1, **_like(old),
    )  # fmt: skip
    carry(new, old, found)
    weight = held(old, found.weight)
    if weight is not None and spec.weight_offset != 0:
        with torch.no_grad():
            gain = (weight.float() + spec.weight_offset).to(weight.dtype)
        new._parameters["weight"] = nn.Parameter(gain, weight.requires_grad)
    return new, f"{'LayerNorm' if spec.centered else 'RMSNorm'} to DynamicTanh, alpha {options.alpha:g}"


CONVERTERS: dict[str, tuple[tuple[str, ...], Converter]] = {
    "group_norm": (("batch",), _to_group),
    "sync_batch_norm": (("batch",), _to_sync),
    "batch_norm": (("batch",), _from_sync),
    "frozen_batch_norm": (("batch",), _to_frozen),
    "rms_norm": (("layer",), _to_rms),
    "dynamic_tanh": (("layer", "rms"), _to_tanh),
}
"""Target to the kinds of norms that it replaces, and how."""
