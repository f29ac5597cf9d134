"""Normalizations by running statistics as functions: what a training step computes, and the statistics it found."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.checks import check_floating, check_number, check_same_device
from normkit.functional.core import norm
from normkit.functional.other import blank, upcast
from normkit.reference import align, standardize
from normkit.spec import NormSpec, check_eps

__all__ = ["batch_renorm", "power_norm"]

_BATCH = NormSpec(axes="batch", channel_dim=1, has_bias=True)


def batch_renorm(
    x: Tensor,
    running_mean: Tensor,
    running_std: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    r_max: float | Tensor,
    d_max: float | Tensor,
    spec: NormSpec = _BATCH,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""One training step of batch renormalization (Ioffe 2017, arXiv:1702.03275), without side effects.

    ``y = ((x - m) / s * r + d) * weight + bias`` with ``s = sqrt(var + eps)``, ``r = clip(s / running_std, 1 / r_max,
    r_max)`` and ``d = clip((m - running_mean) / running_std, -d_max, d_max)``; no gradient flows through r and d.

    Args:
        x: ``(N, C, ...)``, or as ``spec.channel_dim`` says.
        running_mean: ``(C,)``.
        running_std: ``(C,)``, with eps inside.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        r_max: the largest correction of the scale.
        d_max: the largest correction of the mean.
        spec: a batch norm's spec: eps and channel_dim are read.
        mask: x's shape without C, True at valid positions.

    Returns:
        ``(y, m, s)``: the result in x's dtype, and the batch's mean and standard deviation, ``(C,)``, detached.

    Raises:
        TypeError, ValueError: as `normkit.functional.norm`.

    Differs from `torch.nn.functional.batch_norm`: the correction, and nothing is changed in place.
    """
    plain = NormSpec(axes="batch", channel_dim=spec.channel_dim, eps=spec.eps, has_weight=False)
    assert isinstance(plain.channel_dim, int)
    z = blank(upcast(x), mask, plain.channel_dim)
    _check_channels(z, plain.channel_dim, running_mean=running_mean, running_std=running_std)
    normalized = norm(z, plain, mask=mask)
    with torch.no_grad():
        mean, std = batch_deviation(z.detach(), plain, mask)
        center, spread = (align(t.to(z.dtype), plain, z.dim()) for t in (running_mean, running_std))
        r_limit, d_limit = (torch.as_tensor(t, dtype=z.dtype, device=z.device) for t in (r_max, d_max))
        r = _clip(std / spread, 1 / r_limit, r_limit)
        d = _clip((mean - center) / spread, -d_limit, d_limit)
    y = _affine(normalized * r + d, plain, weight, bias, mask)
    return y.to(x.dtype), mean.reshape(-1), std.reshape(-1)


def batch_deviation(x: Tensor, spec: NormSpec, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean of each channel, and the root of its mean square deviation plus eps, which no square overflows."""
    measured = standardize(x, spec, mask)[1]
    scale = measured.scale
    if scale is None:
        return measured.statistics().mean, (measured.square + spec.eps).sqrt()
    return measured.statistics().mean, (measured.square + spec.eps * scale * scale).sqrt() / scale


def normalize_by(
    x: Tensor,
    mean: Tensor | None,
    deviation: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    channel_dim: int,
    mask: Tensor | None,
) -> Tensor:
    """``y = (x - mean) / deviation * weight + bias`` with what is given for each channel, rounded once."""
    spec = NormSpec(axes="batch", channel_dim=channel_dim, has_weight=False)
    z = blank(upcast(x), mask, channel_dim)
    _check_channels(z, channel_dim, deviation=deviation)
    if mean is not None:
        z = z - align(mean.to(z.dtype), spec, z.dim())
    y = z / align(deviation.to(z.dtype), spec, z.dim())
    return _affine(y, spec, weight, bias, mask).to(x.dtype)


def power_norm(
    x: Tensor,
    rms: Tensor,
    nu: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    alpha: float = 0.9,
    channel_dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    r"""One training step of power normalization (Shen et al. 2020, arXiv:2003.07845).

    Forward: ``x̂ = x / sqrt(rms^2 + eps)``, ``y = x̂ * weight + bias``. The backward is the paper's approximation: with
    g the gradient at x̂, the gradient at x is ``(g - nu * x̂) / sqrt(rms^2 + eps)``, and then ``nu`` moves in place:
    ``nu = nu * (1 - (1 - alpha) * mean(x̂^2)) + (1 - alpha) * mean(g * x̂)``.

    Args:
        x: ``(N, ..., C)``, or ``(N, C, ...)`` with ``channel_dim=1``.
        rms: ``(C,)``, the quadratic mean that is divided by (not its square); a constant to autograd.
        nu: ``(C,)``, the running statistic of the backward, changed by it.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        eps: added to the square of ``rms``.
        alpha: how much of ``nu`` stays.
        channel_dim: -1 or 1.
        mask: x's shape without C, True at valid positions; others do not count, get no gradient, and give zero.

    Returns:
        The result, in x's dtype.

    Raises:
        TypeError: integer input.
        ValueError: a shape, eps, alpha or device that does not fit.

    torch has no such function.
    """
    spec = NormSpec(axes="batch", channel_dim=channel_dim, centered=False, eps=eps, has_weight=False)
    check_number("alpha", alpha, 0.0, 1.0)
    z = blank(upcast(x), mask, channel_dim)
    _check_channels(z, channel_dim, rms=rms, nu=nu)
    divisor = stabilized(rms.detach().to(z.dtype), eps)
    inverse = align(torch.where(divisor == 0, 0, 1 / divisor), spec, z.dim())
    if torch.is_grad_enabled() and z.requires_grad:
        valid = None if mask is None else mask.bool().unsqueeze(channel_dim % x.dim())
        normalized = _Approximate.apply(z, inverse, nu, valid, alpha, channel_dim % x.dim())
    else:
        normalized = z * inverse
    return _affine(normalized, spec, weight, bias, mask).to(x.dtype)


def stabilized(rms: Tensor, eps: float) -> Tensor:
    """``sqrt(rms^2 + eps)`` for any rms that its dtype holds."""
    check_eps(eps)
    return torch.hypot(rms, rms.new_tensor(math.sqrt(eps)))


class _Approximate(torch.autograd.Function):
    """x̂ = x * inverse, with the paper's (g - nu * x̂) * inverse as its gradient; the backward moves nu."""

    @staticmethod
    def forward(
        ctx, x: Tensor, inverse: Tensor, nu: Tensor, valid: Tensor | None, alpha: float, channel: int
    ) -> Tensor:
        ctx.save_for_backward(x, inverse, valid)
        ctx.nu, ctx.alpha, ctx.channel = nu, alpha, channel
        return x * inverse

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, inverse, valid = ctx.saved_tensors
        normalized = x * inverse
        channel = ctx.channel
        dims = [d for d in range(normalized.dim()) if d != channel]
        shape = [-1 if d == channel else 1 for d in range(normalized.dim())]
        nu = ctx.nu.detach().to(normalized.dtype, copy=True).reshape(shape)
        with torch.no_grad():
            if normalized.numel() > 0:
                n = normalized.numel() // nu.numel() if valid is None else valid.sum().clamp_min(1)
                quadratic = normalized.square().sum(dims, keepdim=True) / n
                agreement = (gradient * normalized).sum(dims, keepdim=True) / n
                moved = nu * (1 - (1 - ctx.alpha) * quadratic) + (1 - ctx.alpha) * agreement
                ctx.nu.copy_(moved.reshape(-1))
        return (gradient - nu * normalized) * inverse, None, None, None, None, None


def _clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """min(max(x, low), high), kept for a compiled backward.

    Spelled as reductions, which torch's partitioner saves: an elementwise result it would compute again in the
    backward, from running statistics that have moved by then (torch 2.13; gradients were off by 0.2 %).
    """
    return torch.stack([torch.stack([x, low.expand_as(x)]).amax(0), high.expand_as(x)]).amin(0)


def _check_channels(x: Tensor, channel_dim: int, **statistics: Tensor) -> None:
    """Statistics of one number a channel, beside x."""
    for name, value in statistics.items():
        check_floating(name, value)
        check_same_device(name, value, x)
        if tuple(value.shape) != (x.shape[channel_dim],):
            wanted = (x.shape[channel_dim],)
            raise ValueError(f"{name} has shape {tuple(value.shape)}; x of shape {tuple(x.shape)} needs {wanted}")


def _affine(y: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * align(weight.to(y.dtype), spec, y.dim())
    if bias is not None:
        y = y + align(bias.to(y.dtype), spec, y.dim())
    assert isinstance(spec.channel_dim, int)
    return blank(y, mask, spec.channel_dim)
