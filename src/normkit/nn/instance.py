"""InstanceNorm1d, InstanceNorm2d, InstanceNorm3d."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.checks import check_count, check_dtype, check_floating, check_number
from normkit.functional.core import make_spec
from normkit.nn.running import check_momentum, normalize_batch, normalize_running
from normkit.spec import NormSpec, Rounding, check_eps


class InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    r"""Instance normalization (Ulyanov et al. 2016, arXiv:1607.08022): what InstanceNorm1d, 2d and 3d share.

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``, mean and biased variance per sample and
    channel over space; in evaluation the running ones, where they are tracked.

    Args:
        num_features: C, the number of channels.
        eps: added to the variance.
        momentum: the weight of a batch in the running statistics; None leaves them as they are.
            (As in torch, and ``num_batches_tracked`` stays 0.)
        affine: whether to learn a gain and a bias.
        track_running_stats: whether to keep running statistics and evaluate by them, as a batch norm.
        device: where parameters and buffers live.
        dtype: their dtype.
        bias: whether ``affine`` learns a bias.
        weight_offset: added to the stored weight, which then starts at ``1 - weight_offset``.
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        channel_dim: 1, or -1 for channels-last input.
        skip_nonfinite: whether a batch with NaN or infinite statistics leaves the running ones alone.

    Shape:
        ``(N, C, *space)`` or, unbatched, ``(C, *space)`` in and out; channels at the end with ``channel_dim=-1``.

    Raises:
        ValueError: an argument outside its domain; in the forward pass, a wrong shape, or one element of space.

    Differs from `torch.nn.InstanceNorm2d` and its siblings: the keyword-only arguments and ``mask`` are new; a number
    of channels other than ``num_features`` is refused, also without parameters, where torch warns; see
    `normkit.functional.instance_norm` for the numbers. Same state_dict.
    """

    _space = 0
    momentum: float | None  # type: ignore[assignment]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        weight_offset: float = 0.0,
        rounding: Rounding = "after_gain",
        channel_dim: int = 1,
        skip_nonfinite: bool = False,
    ) -> None:
        check_eps(eps)
        check_dtype(dtype)
        num_features = check_count("num_features", num_features, least=0)
        self.weight_offset = check_number("weight_offset", weight_offset)
        check_momentum(momentum)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)  # type: ignore[arg-type]
        if not bias:
            self.register_parameter("bias", None)
        self.rounding: Rounding = rounding
        self.channel_dim = channel_dim
        self.skip_nonfinite = skip_nonfinite
        _ = self.spec  # validates

    @property
    def spec(self) -> NormSpec:
        """What this module computes."""
        return make_spec(
            axes="instance",
            channel_dim=self.channel_dim,
            eps=self.eps,
            has_weight=self.weight is not None,
            weight_offset=self.weight_offset if self.weight is not None else 0.0,
            has_bias=self.bias is not None,
            rounding=self.rounding,
            running=None if self.running_mean is None else self.momentum or 0.0,
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
        if input.dim() == self._space + 1:
            return self._normalize(input.unsqueeze(0), mask if mask is None else mask.unsqueeze(0)).squeeze(0)
        return self._normalize(input, mask)

    def _normalize(self, input: Tensor, mask: Tensor | None) -> Tensor:
        if self.training or self.running_mean is None:
            return normalize_batch(
                self,  # type: ignore[arg-type]
                input,
                self.spec,
                mask=mask,
                momentum=self.momentum or 0.0,
                skip_nonfinite=self.skip_nonfinite,
            )
        return normalize_running(self, input, self.spec, mask=mask)  # type: ignore[arg-type]

    def _get_no_batch_dim(self) -> int:
        return self._space + 1

    def _check_input_dim(self, input: Tensor) -> None:
        check_floating("input", input)
        n, name = self._space, type(self).__name__
        if input.dim() not in (n + 1, n + 2):
            raise ValueError(f"{name} expects input with {n + 1} or {n + 2} dims; got shape {tuple(input.shape)}")
        channels = input.shape[-1 if self.channel_dim == -1 else input.dim() - n - 1]
        if channels != self.num_features:
            raise ValueError(
                f"{name} has num_features={self.num_features}, but input of shape {tuple(input.shape)} has {channels} "
                f"channels; give num_features={channels} or another channel_dim"
            )

    def extra_repr(self) -> str:
        defaults = {"weight_offset": 0.0, "rounding": "after_gain", "channel_dim": 1, "skip_nonfinite": False}
        changed = [
            f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value
        ]
        return ", ".join([super().extra_repr(), *changed])


class InstanceNorm1d(InstanceNorm):
    """`InstanceNorm` for ``(N, C, L)`` and ``(C, L)``; see there.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as `InstanceNorm`.

    Differs from `torch.nn.InstanceNorm1d` as `InstanceNorm` says.
    """

    _space = 1


class InstanceNorm2d(InstanceNorm):
    """`InstanceNorm` for ``(N, C, H, W)`` and ``(C, H, W)``; see there.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as `InstanceNorm`.

    Differs from `torch.nn.InstanceNorm2d` as `InstanceNorm` says.
    """

    _space = 2


class InstanceNorm3d(InstanceNorm):
    """`InstanceNorm` for ``(N, C, D, H, W)`` and ``(C, D, H, W)``; see there.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as `InstanceNorm`.

    Differs from `torch.nn.InstanceNorm3d` as `InstanceNorm` says.
    """

    _space = 3
