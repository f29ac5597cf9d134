"""The less common normalizations as functions: no state, any dtype pair, statistics in float32 at least.

Half-precision input is computed in float32 and rounded once, to the input's dtype, whatever the parameters' dtypes are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.checks import check_floating, check_mask, check_same_device
from normkit.functional.core import norm
from normkit.spec import L2_NORMALIZE, SCALE_NORM, NormSpec, check_eps

__all__ = [
    "derf",
    "dynamic_tanh",
    "filter_response_norm",
    "global_response_norm",
    "l2_norm",
    "layer_scale",
    "linear",
    "modulate",
    "pixel_norm",
    "scale_norm",
    "seed_norm",
]

PIXEL_NORM = NormSpec(channel_dim=1, centered=False, eps=1e-8, has_weight=False)
FILTER_RESPONSE = NormSpec(axes="instance", channel_dim=1, centered=False, eps=1e-6, has_bias=True)


def dynamic_tanh(
    x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, channel_dim: int = -1
) -> Tensor:
    r"""Dynamic Tanh (Zhu et al. 2025, arXiv:2503.10622): ``y = weight * tanh(alpha * x) + bias``.

    Args:
        x: ``(*, normalized_shape)``; ``(N, C, ...)`` with ``channel_dim=1``.
        alpha: one number, ``()`` or ``(1,)``.
        weight: ``normalized_shape`` (``C`` with ``channel_dim=1``), or None.
        bias: as ``weight``.
        channel_dim: -1, or 1 for channels-first input.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError: integer input.
        ValueError: a parameter whose shape or device does not fit.

    torch.nn.functional has no such function; it stands where a norm did and computes no statistic.
    """
    z = upcast(x)
    y = torch.tanh(_scalar("alpha", alpha, z) * z)
    return _affine(y, weight, bias, channel_dim).to(x.dtype)


def derf(
    x: Tensor,
    alpha: Tensor,
    shift: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    channel_dim: int = -1,
) -> Tensor:
    r"""Dynamic erf (Chen et al. 2025, arXiv:2512.10938): ``y = weight * erf(alpha * x + shift) + bias``.

    Args:
        x: ``(*, normalized_shape)``; ``(N, C, ...)`` with ``channel_dim=1``.
        alpha: one number, ``()`` or ``(1,)``.
        shift: one number, ``()`` or ``(1,)``.
        weight: ``normalized_shape`` (``C`` with ``channel_dim=1``), or None.
        bias: as ``weight``.
        channel_dim: -1, or 1 for channels-first input.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError: integer input.
        ValueError: a parameter whose shape or device does not fit.

    torch.nn.functional has no such function; it stands where a norm did and computes no statistic.
    """
    z = upcast(x)
    y = torch.erf(_scalar("alpha", alpha, z) * z + _scalar("shift", shift, z))
    return _affine(y, weight, bias, channel_dim).to(x.dtype)


def layer_scale(x: Tensor, weight: Tensor, *, channel_dim: int = -1) -> Tensor:
    r"""LayerScale (Touvron et al. 2021, arXiv:2103.17239): ``y = weight * x``, one learned factor a channel.

    Args:
        x: ``(*, C)``; ``(N, C, ...)`` with ``channel_dim=1``.
        weight: ``(C,)``.
        channel_dim: -1, or 1 for channels-first input.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError: integer input.
        ValueError: a weight whose shape or device does not fit.

    torch.nn.functional has no such function; ``x * weight`` would have the wider of the two dtypes.
    """
    return _affine(upcast(x), weight, None, channel_dim).to(x.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    r"""The modulation of adaptive layer norm (Peebles and Xie 2022, arXiv:2212.09748): ``y = x * (1 + scale) + shift``.

    Args:
        x: ``(B, ..., C)``.
        shift: ``(B, C)`` for one condition a sample, or more leading dims of x (``(B, T, C)``: one a token).
        scale: as ``shift``.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError: integer input.
        ValueError: shift or scale that does not fit x.

    torch.nn.functional has no such function.
    """
    z = upcast(x)
    return (z * (1 + per_sample("scale", scale, z)) + per_sample("shift", shift, z)).to(x.dtype)


def l2_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-12, channel_dim: int = -1) -> Tensor:
    r"""L2 normalization: ``y = x / max(||x||_2, eps) * weight`` over the features of each position.

    Args:
        x: ``(*, C)``; ``(N, C, ...)`` with ``channel_dim=1``.
        weight: ``(C,)`` or None.
        eps: the smallest norm that is divided by.
        channel_dim: -1, or 1 for channels-first input.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError, ValueError: as `normkit.functional.norm`.

    Differs from `torch.nn.functional.normalize`: the norm is formed in float32 for half precision, so zeros stay zeros
    where torch's eps vanishes in float16, and large values do not overflow.
    """
    spec = l2_spec(eps, weight is not None, channel_dim)
    return norm(x, spec, weight)


def l2_spec(eps: float, has_weight: bool, channel_dim: int) -> NormSpec:
    """The spec of `l2_norm`."""
    return L2_NORMALIZE.replace(eps=eps, has_weight=has_weight, channel_dim=channel_dim, rounding="after_gain")


def scale_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-5, channel_dim: int = -1) -> Tensor:
    r"""ScaleNorm (Nguyen and Salazar 2019, arXiv:1910.05895): ``y = weight * x / max(||x||_2, eps)``, weight a scalar.

    Args:
        x: ``(*, C)``; ``(N, C, ...)`` with ``channel_dim=1``.
        weight: one number, ``()`` or ``(1,)``, or None.
        eps: the smallest norm that is divided by.
        channel_dim: -1, or 1 for channels-first input.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError, ValueError: as `normkit.functional.norm`.

    Differs from `torch.nn.functional.normalize`: the gain, and the length is formed in float32 for half precision.
    """
    return norm(x, scale_spec(eps, weight is not None, channel_dim), weight)


def scale_spec(eps: float, has_weight: bool, channel_dim: int) -> NormSpec:
    """The spec of `scale_norm`."""
    return SCALE_NORM.replace(eps=eps, has_weight=has_weight, channel_dim=channel_dim, rounding="after_gain")


def pixel_norm(x: Tensor, *, eps: float = 1e-8) -> Tensor:
    r"""Pixelwise feature normalization (Karras et al. 2017, arXiv:1710.10196): ``y = x / sqrt(mean_C(x^2) + eps)``.

    Args:
        x: ``(N, C, ...)``.
        eps: added to the mean square.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError, ValueError: as `normkit.functional.norm`.

    Differs from `torch.nn.functional.rms_norm`: over the channels of ``(N, C, ...)``, without a gain.
    """
    return norm(x, PIXEL_NORM.replace(eps=eps))


def filter_response_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    tau: Tensor | None = None,
    eps: float = 1e-6,
    *,
    learned_eps: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Filter response normalization with a thresholded linear unit (Singh and Krishnan 2019, arXiv:1911.09737).

    ``y = max(weight * x / sqrt(mean_space(x^2) + eps + |learned_eps|) + bias, tau)``

    Args:
        x: ``(N, C, ...)`` with at least one space dim.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        tau: ``(C,)``, the threshold, or None for no threshold.
        eps: the fixed part of the stabilizer.
        learned_eps: one number or ``(C,)``: its absolute value is added to ``eps``.
        mask: ``(N, ...)``, True at valid positions: others do not count, and their output is zero.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError: integer input.
        ValueError: a shape, device or eps that does not fit.

    Differs from `torch.nn.functional.instance_norm`: the mean is not removed, and the threshold is part of it.
    """
    check_eps(eps)
    _needs_space(x)
    spec = FILTER_RESPONSE.replace(eps=eps, has_weight=False, has_bias=False)
    z = blank(upcast(x), mask, 1)
    if learned_eps is None:
        y = norm(z, spec, mask=mask)
    else:
        extra = (
            _scalar("learned_eps", learned_eps, z)
            if learned_eps.numel() == 1
            else per_feature("learned_eps", learned_eps, z, 1)
        )
        dims = list(range(2, z.dim()))
        valid = torch.ones_like(z[:, :1]) if mask is None else mask.bool().unsqueeze(1).to(z.dtype)
        root = _length(z, dims) / valid.sum(dims, keepdim=True).clamp_min(1).sqrt()
        y = z / torch.hypot(root, (extra.to(z.dtype).abs() + eps).sqrt())
    y = _affine(y, weight, bias, 1)
    if tau is not None:
        y = torch.maximum(y, per_feature("tau", tau, z, 1))
    return blank(y, mask, 1).to(x.dtype)


def global_response_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6, *, channel_dim: int = -1
) -> Tensor:
    r"""Global response normalization (Woo et al. 2023, arXiv:2301.00808): each channel's share of the response.

    ``G_c = ||x_c||_2`` over space, ``N_c = G_c / (mean_C(G) + eps)``, ``y = weight * (x * N) + bias + x``

    Args:
        x: ``(N, H, W, C)`` (any number of space dims); ``(N, C, H, W)`` with ``channel_dim=1``.
        weight: ``(C,)`` or None (one).
        bias: ``(C,)`` or None.
        eps: added to the mean response.
        channel_dim: -1, or 1 for channels-first input.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError: integer input.
        ValueError: a shape, device or eps that does not fit.

    torch.nn.functional has no such function.
    """
    check_eps(eps)
    _needs_space(x)
    z = upcast(x)
    channel = _channel(z, channel_dim)
    response = _length(z, [d for d in range(1, z.dim()) if d != channel])
    average = response.mean(channel, keepdim=True)
    share = response / (average + eps)
    if eps == 0:  # a silent sample has no share to give
        share = torch.where(average > 0, share, 0)
    return (_affine(z * share, weight, bias, channel_dim) + z).to(x.dtype)


def seed_norm(
    x: Tensor,
    weight: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    eps: float = 1e-6,
    *,
    heads: int = 1,
) -> Tensor:
    r"""Self-rescaled dynamic normalization (Cai et al. 2025, arXiv:2510.22777): a gain that sees the input's length.

    ``y = (tanh(x . beta) * alpha + weight) * x / sqrt(mean(x^2) + eps)``; with several heads, ``x . beta`` is one dot
    product for each of ``heads`` equal parts of the features.

    Args:
        x: ``(*, C)``.
        weight: ``(C,)``, the static gain, or None (one).
        alpha: ``(C,)``, how much the dynamic gain moves each feature.
        beta: ``(C,)``, the direction that the input is compared with.
        eps: added to the mean square.
        heads: the number of parts with a dot product each.

    Returns:
        The result, in x's dtype and shape.

    Raises:
        TypeError: integer input.
        ValueError: a shape, device or eps that does not fit, or heads that do not divide the features.

    Differs from `torch.nn.functional.rms_norm`: the gain depends on the input.
    """
    z = upcast(x)
    normalized = norm(z, NormSpec(centered=False, eps=eps, has_weight=False))
    b = per_feature("beta", beta, z, -1)
    a = per_feature("alpha", alpha, z, -1)
    features = z.shape[-1]
    if heads < 1 or features % heads:
        raise ValueError(f"heads={heads} must be >= 1 and divide the {features} features of x")
    dots = (z * b).unflatten(-1, (heads, features // heads)).sum(-1, keepdim=True)
    dynamic = torch.tanh(dots).expand(*dots.shape[:-1], features // heads).reshape(z.shape) * a
    gain = dynamic + (1 if weight is None else per_feature("weight", weight, z, -1))
    return (gain * normalized).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map for any pair of dtypes: formed in the wider one (torch refuses a mixed pair)."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def blank(x: Tensor, mask: Tensor | None, channel_dim: int) -> Tensor:
    """Zero where the mask (x's shape without the channel dim) is not True: NaN in the padding goes nowhere."""
    if mask is None:
        return x
    channel = _channel(x, channel_dim)
    check_mask(mask, x, channel)
    return torch.where(mask.bool().unsqueeze(channel), x, 0)


def upcast(x: Tensor) -> Tensor:
    """x in float32 at least."""
    check_floating("x", x)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, channel_dim: int) -> Tensor:
    if weight is not None:
        y = y * per_feature("weight", weight, y, channel_dim)
    return y if bias is None else y + per_feature("bias", bias, y, channel_dim)


def _channel(x: Tensor, channel_dim: int) -> int:
    if channel_dim not in (-1, 1):
        raise ValueError(f"channel_dim must be -1 or 1; got {channel_dim!r}")
    if channel_dim >= x.dim():
        raise ValueError(f"channel_dim={channel_dim} needs x of at least 2 dims; got shape {tuple(x.shape)}")
    return channel_dim % x.dim()


def _needs_space(x: Tensor) -> None:
    check_floating("x", x)
    if x.dim() < 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; it needs a batch, a channel and at least one space dim")


def per_feature(name: str, parameter: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """A parameter in x's dtype, shaped to broadcast over x: trailing dims, or dim 1."""
    channel = _channel(x, channel_dim)
    check_floating(name, parameter)
    n = parameter.dim()
    wanted: Sequence[int] = x.shape[max(x.dim() - n, 0) :] if channel_dim == -1 else (x.shape[1],)
    if n == 0 or tuple(parameter.shape) != tuple(wanted):
        raise ValueError(
            f"{name} has shape {tuple(parameter.shape)}; x of shape {tuple(x.shape)} with channel_dim={channel_dim} "
            f"needs {tuple(wanted) if n else (x.shape[channel],)}"
        )
    check_same_device(name, parameter, x)
    if channel_dim == 1 and x.dim() > 2:
        parameter = parameter.reshape(-1, *[1] * (x.dim() - 2))
    return parameter.to(x.dtype)


def _scalar(name: str, parameter: Tensor, x: Tensor) -> Tensor:
    check_floating(name, parameter)
    if parameter.numel() != 1 or parameter.dim() > 1:
        raise ValueError(f"{name} must be one number, of shape () or (1,); got shape {tuple(parameter.shape)}")
    check_same_device(name, parameter, x)
    return parameter.reshape(()).to(x.dtype)


def per_sample(name: str, value: Tensor, x: Tensor) -> Tensor:
    """Shape ``(B, C)`` (or more leading dims) to broadcast against ``(B, ..., C)``."""
    check_floating(name, value)
    lead = value.dim() - 1
    fits = 1 <= value.dim() <= x.dim() and value.shape[-1] == x.shape[-1]
    fits = fits and all(v in (1, n) for v, n in zip(value.shape[:lead], x.shape[:-1], strict=False))
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; x of shape {tuple(x.shape)} needs its leading dims, then "
            f"{x.shape[-1] if x.dim() else 'features'}: for example {(*x.shape[:1], *x.shape[-1:])}"
        )
    check_same_device(name, value, x)
    return value.to(x.dtype).reshape(*value.shape[:lead], *[1] * (x.dim() - value.dim()), value.shape[-1])


def _length(x: Tensor, dims: list[int]) -> Tensor:
    """The L2 norm over dims: no overflow for large values, a zero gradient (and no NaN) at zero."""
    if math.prod([x.shape[d] for d in dims]) == 0 or x.numel() == 0:
        return x.pow(2).sum(dims, keepdim=True)
    largest = x.detach().abs().amax(dims, keepdim=True)
    unit = torch.where((largest > 0) & torch.isfinite(largest), largest, 1)
    square = (x / unit).pow(2).sum(dims, keepdim=True)
    safe = torch.where(square == 0, 1, square)
    return torch.where(square == 0, torch.zeros_like(square), safe.sqrt()) * unit
