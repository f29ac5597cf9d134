"""Batch norms with other statistics: BatchRenorm and GhostBatchNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checks import check_floating, check_same_device
from normkit.functional.other import blank
from normkit.functional.renorm import batch_renorm, normalize_by
from normkit.nn._shared import Device, count, empty, fill, load_uncounted, move, number, recomputing
from normkit.reference import normalize, statistics
from normkit.spec import NormSpec


@dataclass(frozen=True)
class Ramp:
    """A value that moves in a straight line from ``start`` to ``stop`` between the steps ``first`` and ``last``."""

    start: float
    stop: float
    first: int
    last: int

    def __post_init__(self) -> None:
        count("first", self.first, least=0)
        if self.last <= self.first:
            raise ValueError(f"last must be after first; got first={self.first}, last={self.last}")

    def __call__(self, step: Tensor) -> Tensor:
        """The value after ``step`` training batches."""
        done = ((step.float() - self.first) / (self.last - self.first)).clamp(0, 1)
        return self.start + (self.stop - self.start) * done


PAPER_R_MAX = Ramp(1.0, 3.0, 5_000, 40_000)
PAPER_D_MAX = Ramp(0.0, 5.0, 5_000, 25_000)


class _Batch(nn.Module):
    """What the batch norms of this file share: parameters, checks and the spec."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float,
        affine: bool,
        channel_dim: int,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.num_features = count("num_features", num_features)
        self.momentum = number("momentum", momentum, 0.0, 1.0)
        self.spec = NormSpec(
            axes="batch", channel_dim=channel_dim, eps=eps, has_weight=affine, has_bias=affine, running=momentum
        )
        self.register_parameter("weight", empty((num_features,), device, dtype) if affine else None)
        self.register_parameter("bias", empty((num_features,), device, dtype) if affine else None)
        self.register_buffer("running_mean", torch.zeros(num_features, device=device, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        load_uncounted(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def reset_running_stats(self) -> None:
        """Forget every batch seen."""
        fill(self.running_mean, 0.0)
        self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Gain 1, bias 0, and no batch seen."""
        self.reset_running_stats()
        fill(self.weight, 1.0)
        fill(self.bias, 0.0)

    def _check(self, x: Tensor) -> None:
        channel = self.spec.channel_dim
        check_floating("input", x)
        check_same_device("running_mean", self.running_mean, x)
        if x.dim() < 2 or x.shape[channel] != self.num_features:  # type: ignore[index]
            raise ValueError(f"dim {channel} of input must be num_features={self.num_features}; got {tuple(x.shape)}")
        if self.training and 0 < x.numel() <= self.num_features:
            raise ValueError(
                f"training needs more than one value per channel; got input of shape {tuple(x.shape)}. "
                "Use a larger batch, or eval()"
            )

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.spec.eps}, momentum={self.momentum}, affine={self.weight is not None}"


class BatchRenorm(_Batch):
    r"""Batch renormalization (Ioffe 2017, arXiv:1702.03275): training sees what evaluation will.

    In training, with the batch's mean m and standard deviation s = sqrt(var + eps), and the running M and S::

        r = clip(s / S, 1 / r_max, r_max)        d = clip((m - M) / S, -d_max, d_max)        (no gradient through r, d)
        y = ((x - m) / s * r + d) * weight + bias
        M += momentum * (m - M)                  S += momentum * (s - S)

    and in evaluation ``y = (x - M) / S * weight + bias``.

    Args:
        num_features: C, the number of channels.
        eps: added to the batch variance.
        momentum: the share that a new batch has in the running statistics.
        affine: whether to learn gain and bias.
        device: where parameters and buffers live.
        dtype: their dtype.
        r_max: the largest correction of the scale, >= 1: a number, or a `Ramp` over the batches seen.
        d_max: the largest correction of the mean, >= 0: a number, or a `Ramp`. The defaults are the paper's: 1 and 0
            (plain batch norm) for 5 000 batches, then slowly 3 (at 40 000) and 5 (at 25 000).
        channel_dim: 1 for ``(N, C, ...)``, -1 for ``(N, ..., C)``.

    Shape:
        ``(N, C)`` or ``(N, C, ...)`` in and out. ``mask``: x's shape without C, True at valid positions; others do not
        count, get no gradient, and their output is zero.

    Raises:
        ValueError, TypeError: an argument outside its domain; one value per channel in training.

    Half precision: statistics and result in float32, rounded once. Differs from `torch.nn.BatchNorm2d`: the correction;
    ``running_std`` (eps inside) in place of ``running_var``; any number of space dims. An empty batch does not count.
    A forward that activation checkpointing repeats neither counts twice nor sees newer statistics, as long as the layer
    is called once between backward passes.
    """

    running_mean: Tensor
    running_std: Tensor
    previous_mean: Tensor
    previous_std: Tensor
    previous_count: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.01,
        affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        r_max: float | Ramp = PAPER_R_MAX,
        d_max: float | Ramp = PAPER_D_MAX,
        channel_dim: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, channel_dim, device, dtype)
        lowest = {"r_max": 1.0, "d_max": 0.0}
        for name, limit in (("r_max", r_max), ("d_max", d_max)):
            for value in (limit.start, limit.stop) if isinstance(limit, Ramp) else (limit,):
                number(name, value, lowest[name])
        self.r_max = r_max
        self.d_max = d_max
        self.register_buffer("running_std", torch.ones(num_features, device=device, dtype=dtype))
        for name in ("mean", "std"):
            value = torch.zeros(num_features, device=device, dtype=dtype)
            self.register_buffer(f"previous_{name}", value, persistent=False)
        self.register_buffer("previous_count", torch.tensor(0, device=device), persistent=False)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Mean 0, standard deviation 1, no batch seen."""
        super().reset_running_stats()
        fill(self.running_std, 1.0)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize; in training, move the running statistics."""
        self._check(input)
        if not self.training:
            channel = self.spec.channel_dim
            mean, std = self.running_mean, self.running_std  # which has eps inside
            return normalize_by(input, mean, std, self.weight, self.bias, channel, mask)  # type: ignore[arg-type]
        repeated = recomputing()
        if not repeated:
            with torch.no_grad():
                self.previous_mean.copy_(self.running_mean)
                self.previous_std.copy_(self.running_std)
                self.previous_count.copy_(self.num_batches_tracked)
        y, mean, std = batch_renorm(
            input,
            self.previous_mean.clone(),
            self.previous_std.clone(),
            self.weight,
            self.bias,
            r_max=self._limit(self.r_max),
            d_max=self._limit(self.d_max),
            spec=self.spec,
            mask=mask,
        )
        if not repeated and input.numel() > 0:
            with torch.no_grad():
                seen = torch.ones_like(self.num_batches_tracked) if mask is None else mask.bool().any().long()
                move(self.running_mean, mean, self.momentum * seen.to(mean.dtype))
                move(self.running_std, std, self.momentum * seen.to(std.dtype))
                self.num_batches_tracked.add_(seen)
        return y

    def _limit(self, limit: float | Ramp) -> Tensor | float:
        return limit(self.previous_count) if isinstance(limit, Ramp) else limit

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, r_max={self.r_max}, d_max={self.d_max}"


class GhostBatchNorm(_Batch):
    r"""Ghost batch normalization (Hoffer et al. 2017, arXiv:1705.08741): batch norm over parts of the batch.

    In training the batch is cut into consecutive parts; each is normalized by its own mean and variance, and each moves
    the running statistics in turn, as if it were a batch: ``running += momentum * (part - running)``. In evaluation
    ``y = (x - running_mean) / sqrt(running_var + eps) * weight + bias``.

    Args:
        num_features: C, the number of channels.
        ghost_size: the samples of one part. A batch that it does not divide is cut into ``N // ghost_size`` nearly
            equal parts, none smaller than ``ghost_size``; a smaller batch is one part.
        eps: added to the variance.
        momentum: the share that a new part has in the running statistics.
        affine: whether to learn gain and bias.
        device: where parameters and buffers live.
        dtype: their dtype.
        channel_dim: 1 for ``(N, C, ...)``, -1 for ``(N, ..., C)``.

    Shape:
        ``(N, C)`` or ``(N, C, ...)`` in and out. ``mask``: x's shape without C, True at valid positions; others do not
        count, get no gradient, and their output is zero.

    Raises:
        ValueError, TypeError: an argument outside its domain; one value per channel in a part.

    Half precision: statistics and result in float32, rounded once. Differs from `torch.nn.BatchNorm2d`, whose
    state_dict keys it has, by the parts; ``running_var`` takes torch's unbiased variance where the paper averages
    standard deviations, and the running average goes part by part, which is how the paper's sum of powers is read here.
    ``num_batches_tracked`` counts batches, not parts. An empty batch, or a part that is all padding, does not count.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        ghost_size: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        channel_dim: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, channel_dim, device, dtype)
        self.ghost_size = count("ghost_size", ghost_size)
        self.register_buffer("running_var", torch.ones(num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Mean 0, variance 1, no batch seen."""
        super().reset_running_stats()
        fill(self.running_var, 1.0)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize part by part; in training, move the running statistics."""
        self._check(input)
        if not self.training:
            mean, var = self.running_mean, self.running_var
            return normalize(input, self.spec, self.weight, self.bias, mask=mask, running_mean=mean, running_var=var)
        parts = blank(input, mask, self.spec.channel_dim).tensor_split(  # type: ignore[arg-type]
            max(1, input.shape[0] // self.ghost_size)
        )
        if 0 < parts[-1].numel() <= self.num_features:  # the last part is never the larger one
            raise ValueError(
                f"a part of shape {tuple(parts[-1].shape)} has one value per channel; use a larger ghost_size than "
                f"{self.ghost_size}"
            )
        masks = [None] * len(parts) if mask is None else list(mask.tensor_split(len(parts)))
        out = [normalize(x, self.spec, self.weight, self.bias, mask=m) for x, m in zip(parts, masks, strict=True)]
        if not recomputing() and input.numel() > 0:
            for x, m in zip(parts, masks, strict=True):
                self._track(x, m)
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
        return torch.cat(out)

    @torch.no_grad()
    def _track(self, x: Tensor, mask: Tensor | None) -> None:
        mean, square, n = statistics(x, self.spec, mask)
        seen = square.new_ones(()) if mask is None else mask.bool().any().to(square.dtype)
        spare = max(n - 1, 1) if isinstance(n, int) else (n - 1).clamp_min(1)
        move(self.running_mean, mean, self.momentum * seen)
        move(self.running_var, square * n / spare, self.momentum * seen)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}"
