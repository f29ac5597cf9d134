"""Layers that stand in a norm's place and compute no statistic: DynamicTanh, Derf, LayerScale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normkit.functional import as_shape
from normkit.functional import other as E
from normkit.nn._shared import Device, count, empty, fill, number


class _Pointwise(nn.Module):
    """What DynamicTanh and Derf share: a scalar alpha and an affine map."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        elementwise_affine: bool,
        bias: bool,
        alpha_init: float,
        channel_dim: int,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.normalized_shape = as_shape(normalized_shape)
        self.elementwise_affine = elementwise_affine
        self.alpha_init = number("alpha_init", alpha_init)
        self.channel_dim = channel_dim
        if channel_dim not in (-1, 1):
            raise ValueError(f"channel_dim must be -1 or 1; got {channel_dim!r}")
        if channel_dim == 1 and len(self.normalized_shape) != 1:
            raise ValueError(f"channel_dim=1 needs one feature dim; got normalized_shape {self.normalized_shape}")
        shape = self.normalized_shape
        self.alpha = empty((1,), device, dtype)
        self.register_parameter("weight", empty(shape, device, dtype) if elementwise_affine else None)
        self.register_parameter("bias", empty(shape, device, dtype) if elementwise_affine and bias else None)

    def reset_parameters(self) -> None:
        """``alpha`` at ``alpha_init``, gain 1, bias 0."""
        fill(self.alpha, self.alpha_init)
        fill(self.weight, 1.0)
        fill(self.bias, 0.0)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, elementwise_affine={self.elementwise_affine}, alpha_init={self.alpha_init}"
        return text if self.channel_dim == -1 else f"{text}, channel_dim={self.channel_dim}"


class DynamicTanh(_Pointwise):
    r"""Dynamic Tanh (Zhu et al. 2025, arXiv:2503.10622): ``y = weight * tanh(alpha * x) + bias``.

    Args:
        normalized_shape: the trailing feature dims of the input, as of the norm that it replaces.
        elementwise_affine: whether to learn gain and bias (``alpha`` is always learned).
        bias: whether to learn a bias.
        device: where the parameters live.
        dtype: the parameters' dtype.
        alpha_init: where the scalar ``alpha`` starts.
        channel_dim: 1 for channels-first input ``(N, C, ...)``.

    Shape:
        ``(*, normalized_shape)`` in and out; ``(N, C, ...)`` with ``channel_dim=1``.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: computed in float32, rounded once. torch.nn has no such layer; the state_dict keys ``alpha``,
    ``weight`` and ``bias`` are those of the authors' code.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        alpha_init: float = 0.5,
        channel_dim: int = -1,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, bias, alpha_init, channel_dim, device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return E.dynamic_tanh(input, self.alpha, self.weight, self.bias, channel_dim=self.channel_dim)


class Derf(_Pointwise):
    r"""Dynamic erf (Chen et al. 2025, arXiv:2512.10938): ``y = weight * erf(alpha * x + shift) + bias``.

    Args:
        normalized_shape: the trailing feature dims of the input, as of the norm that it replaces.
        elementwise_affine: whether to learn gain and bias (``alpha`` and ``shift`` are always learned).
        bias: whether to learn a bias.
        device: where the parameters live.
        dtype: the parameters' dtype.
        alpha_init: where the scalar ``alpha`` starts.
        shift_init: where the scalar ``shift`` starts.
        channel_dim: 1 for channels-first input ``(N, C, ...)``.

    Shape:
        ``(*, normalized_shape)`` in and out; ``(N, C, ...)`` with ``channel_dim=1``.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: computed in float32, rounded once. torch.nn has no such layer; the state_dict keys ``alpha``,
    ``shift``, ``weight`` and ``bias`` are those of the authors' code.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        alpha_init: float = 0.5,
        shift_init: float = 0.0,
        channel_dim: int = -1,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, bias, alpha_init, channel_dim, device, dtype)
        self.shift_init = number("shift_init", shift_init)
        self.shift = empty((1,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """``alpha`` and ``shift`` at their starting values, gain 1, bias 0."""
        super().reset_parameters()
        fill(self.shift, self.shift_init)

    def forward(self, input: Tensor) -> Tensor:
        return E.derf(input, self.alpha, self.shift, self.weight, self.bias, channel_dim=self.channel_dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shift_init={self.shift_init}"


class LayerScale(nn.Module):
    r"""LayerScale (Touvron et al. 2021, arXiv:2103.17239): ``y = weight * x``, at the end of a residual branch.

    Args:
        features: C, the number of channels.
        init: where every factor starts; the paper starts lower in deeper networks (0.1, 1e-5, 1e-6).
        device: where the parameter lives.
        dtype: its dtype.
        channel_dim: 1 for channels-first input ``(N, C, ...)``.

    Shape:
        ``(*, C)`` in and out; ``(N, C, ...)`` with ``channel_dim=1``.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: the product is formed in float32 and rounded once, to the input's dtype. torch.nn has no such layer.
    """

    def __init__(
        self,
        features: int,
        init: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        channel_dim: int = -1,
    ) -> None:
        super().__init__()
        self.features = count("features", features)
        self.init = number("init", init)
        if channel_dim not in (-1, 1):
            raise ValueError(f"channel_dim must be -1 or 1; got {channel_dim!r}")
        self.channel_dim = channel_dim
        self.weight = empty((features,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every factor at ``init``."""
        fill(self.weight, self.init)

    def forward(self, input: Tensor) -> Tensor:
        return E.layer_scale(input, self.weight, channel_dim=self.channel_dim)

    def extra_repr(self) -> str:
        text = f"{self.features}, init={self.init}"
        return text if self.channel_dim == -1 else f"{text}, channel_dim={self.channel_dim}"
