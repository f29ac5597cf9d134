"""PowerNorm: a batch norm of the quadratic mean, with running statistics in training and an approximate backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.checks import check_floating, check_same_device
from normkit.functional import norm
from normkit.functional.other import blank, upcast
from normkit.functional.renorm import batch_deviation, normalize_by, power_norm, stabilized
from normkit.nn._shared import Device, count, empty, fill, number, recomputing
from normkit.spec import NormSpec


class PowerNorm(nn.Module):
    r"""Power normalization (Shen et al. 2020, arXiv:2003.07845): a running quadratic mean, also in training.

    Each training step, with P the running and p the batch's mean square of each channel::

        x̂ = x / sqrt(P + eps)        y = x̂ * weight + bias        then P = alpha * P + (1 - alpha) * p
        backward: g = dL/dy * weight;   dL/dx = (g - nu * x̂) / sqrt(P + eps)
                  nu = nu * (1 - (1 - alpha) * mean(x̂^2)) + (1 - alpha) * mean(g * x̂)

    For the first ``warmup`` batches p is divided by in place of P, and P is their plain average. The buffer
    ``running_rms`` holds the root of P, so that no value of the input is too large or too small for it.

    Args:
        num_features: C, the number of channels.
        eps: added to the quadratic mean.
        alpha: how much of P stays in a step.
        alpha_backward: how much of nu stays; ``alpha`` if None.
        affine: whether to learn gain and bias.
        device: where parameters and buffers live.
        dtype: their dtype.
        warmup: the number of batches that are normalized by their own quadratic mean.
        groups: None, or the number of parts of each position's features that are scaled to quadratic mean 1 first, as
            the authors' code does.
        channel_dim: -1 for ``(B, T, C)``, 1 for ``(N, C, ...)``.

    Shape:
        ``(N, C)`` or ``(B, T, C)`` in and out; ``(N, C, ...)`` with ``channel_dim=1``. ``mask``: x's shape without C,
        True at valid positions; others do not count, get no gradient, and their output is zero.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: statistics and result in float32, rounded once. Differs from `torch.nn.BatchNorm1d`: no mean is
    removed; training divides by the running statistic; the gradient in training is the paper's approximation (so
    numerical differentiation does not reproduce it), and the backward pass changes ``nu``. Differs from the authors'
    code, which divides the gradient by the batch's quadratic mean also after warm-up, and averages P twice during it.
    A forward that activation checkpointing repeats neither counts twice nor sees newer statistics, as long as the layer
    is called once between backward passes. ``spec`` is what evaluation computes.
    """

    running_rms: Tensor
    nu: Tensor
    previous_rms: Tensor
    previous_count: Tensor
    num_batches_tracked: Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        alpha: float = 0.9,
        alpha_backward: float | None = None,
        affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        warmup: int = 10_000,
        groups: int | None = None,
        channel_dim: int = -1,
    ) -> None:
        super().__init__()
        self.num_features = count("num_features", num_features)
        self.alpha = number("alpha", alpha, 0.0, 1.0)
        self.alpha_backward = (
            self.alpha if alpha_backward is None else number("alpha_backward", alpha_backward, 0.0, 1.0)
        )
        self.warmup = count("warmup", warmup, least=0)
        self.groups = groups
        if groups is not None and num_features % count("groups", groups):
            raise ValueError(f"groups={groups} does not divide num_features {num_features}")
        self.spec = NormSpec(
            axes="batch",
            channel_dim=channel_dim,
            centered=False,
            eps=eps,
            has_weight=affine,
            has_bias=affine,
            running=1 - self.alpha,
        )
        self.register_parameter("weight", empty((num_features,), device, dtype) if affine else None)
        self.register_parameter("bias", empty((num_features,), device, dtype) if affine else None)
        for name, persistent in (("running_rms", True), ("nu", True), ("previous_rms", False)):
            value = torch.zeros(num_features, device=device, dtype=dtype)
            self.register_buffer(name, value, persistent=persistent)
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=device))
        self.register_buffer("previous_count", torch.tensor(0, device=device), persistent=False)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Quadratic mean 1, nu 0, no batch seen."""
        fill(self.running_rms, 1.0)
        fill(self.nu, 0.0)
        self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Gain 1, bias 0, and no batch seen."""
        self.reset_running_stats()
        fill(self.weight, 1.0)
        fill(self.bias, 0.0)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize; in training, move the running quadratic mean."""
        channel = self.spec.channel_dim
        check_floating("input", input)
        check_same_device("running_rms", self.running_rms, input)
        if input.dim() < 2 or input.shape[channel] != self.num_features:  # type: ignore[index]
            raise ValueError(
                f"dim {channel} of input must be num_features={self.num_features}; got {tuple(input.shape)}"
            )
        x = blank(input, mask, channel)  # type: ignore[arg-type]
        if self.groups is not None:
            scaling = NormSpec(
                channel_dim=channel, centered=False, eps=self.spec.eps, groups=self.groups, has_weight=False
            )
            x = norm(x.to(torch.promote_types(x.dtype, torch.float32)), scaling)
        if not self.training:
            rms = self.running_rms.to(torch.promote_types(x.dtype, torch.float32))
            divisor = stabilized(rms, self.spec.eps)
            y = normalize_by(x, None, divisor, self.weight, self.bias, channel, mask)  # type: ignore[arg-type]
            return y.to(input.dtype)
        y = power_norm(
            x,
            self._divisor(x.detach(), mask),
            self.nu,
            self.weight,
            self.bias,
            eps=self.spec.eps,
            alpha=self.alpha_backward,
            channel_dim=channel,  # type: ignore[arg-type]
            mask=mask,
        )
        return y.to(input.dtype)

    @torch.no_grad()
    def _divisor(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The quadratic mean that this step divides by; moves the running one."""
        repeated = recomputing()
        if not repeated:
            self.previous_rms.copy_(self.running_rms)
            self.previous_count.copy_(self.num_batches_tracked)
        if x.numel() == 0:
            return self.previous_rms.clone()
        rms = batch_deviation(upcast(x), self.spec.replace(eps=0.0), mask)[1].reshape(-1)
        previous = self.previous_rms.to(rms.dtype)
        step = self.previous_count + 1
        warming = step <= self.warmup
        if not repeated:
            seen = torch.ones_like(step) if mask is None else mask.bool().any().long()
            average, moving = 1 / step.to(rms.dtype), torch.full_like(rms[0], 1 - self.alpha)
            share = torch.where(warming, average, moving) * seen
            self.running_rms.copy_(torch.hypot((1 - share).sqrt() * previous, share.sqrt() * rms))
            self.num_batches_tracked.add_(seen)
        return torch.where(warming, rms, previous)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.spec.eps}, alpha={self.alpha}, warmup={self.warmup}, groups={self.groups}"
        )
