"""BatchNorm of any rank, BatchNorm1d, BatchNorm2d, BatchNorm3d."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.checks import check_count, check_dtype, check_floating, check_number
from normkit.functional.batch import check_positive_eps
from normkit.functional.core import make_spec
from normkit.nn.running import Single, check_momentum, check_single, normalize_batch, normalize_running
from normkit.spec import NormSpec, Rounding, check_eps


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    r"""Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167) as a module, for input of any rank.

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``, mean and biased variance per channel over
    all other dims; in evaluation the running ones.

    Args:
        num_features: C, the number of channels.
        eps: added to the variance.
        momentum: the weight of a batch in the running statistics; None for a plain average over batches.
        affine: whether to learn a gain and a bias.
        track_running_stats: whether to keep running statistics and evaluate by them.
        device: where parameters and buffers live.
        dtype: their dtype.
        bias: whether to learn a bias.
        weight_offset: added to the stored weight, which then starts at ``1 - weight_offset``.
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        channel_dim: 1, or -1 for channels-last input.
        single: what a training batch with one value per channel does: ``"error"``; ``"running"``: it is normalized by
            the running statistics, which stay; ``"skip"``: it passes unchanged.
        skip_nonfinite: whether a batch with NaN or infinite statistics leaves the running ones alone.

    Shape:
        ``(N, C)`` or ``(N, C, ...)`` in and out; ``(N, ..., C)`` with ``channel_dim=-1``.

    Raises:
        ValueError: an argument outside its domain; in the forward pass, a wrong shape, or one value per channel.

    Differs from `torch.nn.BatchNorm2d` and its siblings: the keyword-only arguments and ``mask`` are new; an empty
    batch does not count; activation checkpointing does not count a batch twice; see `normkit.functional.batch_norm` for
    the numbers. Same state_dict. It is a subclass of torch's, so that tools that look for batch norms find it. As in
    torch, a variance beyond its buffer's dtype (values past 1e19 in float32) makes ``running_var`` infinite, and under
    `torch.func` transforms training needs ``functional_call`` with the buffers, or
    `normkit.functional.batch_norm_functional`.
    """

    _ranks: tuple[int, ...] = ()
    momentum: float | None  # type: ignore[assignment]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        weight_offset: float = 0.0,
        rounding: Rounding = "after_gain",
        channel_dim: int = 1,
        single: Single = "error",
        skip_nonfinite: bool = False,
    ) -> None:
        check_eps(eps)
        check_dtype(dtype)
        num_features = check_count("num_features", num_features, least=0)
        self.weight_offset = check_number("weight_offset", weight_offset)
        super().__init__(num_features, eps, check_momentum(momentum), affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.rounding: Rounding = rounding
        self.channel_dim = channel_dim
        self.single: Single = check_single(single)
        self.skip_nonfinite = skip_nonfinite
        _ = self.spec  # validates

    @property
    def spec(self) -> NormSpec:
        """What this module computes."""
        tracked = self.running_mean is not None
        return make_spec(
            axes="batch",
            channel_dim=self.channel_dim,
            eps=self.eps,
            has_weight=self.weight is not None,
            weight_offset=self.weight_offset if self.weight is not None else 0.0,
            has_bias=self.bias is not None,
            rounding=self.rounding,
            running=None if not tracked else "cumulative" if self.momentum is None else self.momentum,
        )

    def reset_parameters(self) -> None:
        """Running mean 0 and variance 1; gain 1 (a stored weight of 1 - weight_offset), bias 0."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Normalize.

        Args:
            input: see Shape.
            mask: input's shape without the channel dim, True (or 1) at valid positions. Others do not count, have
                output zero and get no gradient.
        """
        self._check_input_dim(input)
        if self.training or self.running_mean is None:
            check_positive_eps(self.eps)
            return self._normalize_batch(input, mask)
        return normalize_running(self, input, self.spec, mask=mask)  # type: ignore[arg-type]

    def _normalize_batch(self, input: Tensor, mask: Tensor | None) -> Tensor:
        return normalize_batch(
            self,  # type: ignore[arg-type]
            input,
            self.spec,
            mask=mask,
            momentum=self.momentum,
            single=self.single,
            skip_nonfinite=self.skip_nonfinite,
        )

    def _check_input_dim(self, input: Tensor) -> None:
        check_input(input, self.num_features, self.channel_dim, self._ranks or None, type(self).__name__)

    def extra_repr(self) -> str:
        defaults = {"weight_offset": 0.0, "rounding": "after_gain", "channel_dim": 1}
        defaults |= {"single": "error", "skip_nonfinite": False}
        changed = [
            f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value
        ]
        return ", ".join([super().extra_repr(), *changed])


class BatchNorm1d(BatchNorm):
    """`BatchNorm` for ``(N, C)`` and ``(N, C, L)``, or ``(N, L, C)`` with ``channel_dim=-1``; see there.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as `BatchNorm`.

    Differs from `torch.nn.BatchNorm1d` as `BatchNorm` says: sequences ``(B, T, C)`` need no transpose, and padding
    (``mask`` of shape ``(B, T)``) does not count.
    """

    _ranks = (2, 3)


class BatchNorm2d(BatchNorm):
    """`BatchNorm` for ``(N, C, H, W)``, or ``(N, H, W, C)`` with ``channel_dim=-1``; see there.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as `BatchNorm`.

    Differs from `torch.nn.BatchNorm2d` as `BatchNorm` says.
    """

    _ranks = (4,)


class BatchNorm3d(BatchNorm):
    """`BatchNorm` for ``(N, C, D, H, W)``, or ``(N, D, H, W, C)`` with ``channel_dim=-1``; see there.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as `BatchNorm`.

    Differs from `torch.nn.BatchNorm3d` as `BatchNorm` says.
    """

    _ranks = (5,)


def check_input(x: Tensor, features: int, channel_dim: int, ranks: tuple[int, ...] | None, name: str) -> None:
    """Refuse an input of another rank or with another number of channels."""
    check_floating("input", x)
    if x.dim() < 2 or (ranks is not None and x.dim() not in ranks):
        wanted = "at least 2" if ranks is None else " or ".join(map(str, ranks))
        raise ValueError(f"{name} expects input with {wanted} dims; got shape {tuple(x.shape)}")
    if x.shape[channel_dim] != features:
        raise ValueError(
            f"{name} has num_features={features}, but input of shape {tuple(x.shape)} has {x.shape[channel_dim]} "
            f"channels at dim {channel_dim}; give num_features={x.shape[channel_dim]} or another channel_dim"
        )
