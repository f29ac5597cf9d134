"""Norms that divide by a length: ScaleNorm, L2Norm, PixelNorm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normkit.checks import check_floating
from normkit.functional import other as E
from normkit.nn._shared import Device, count, empty, fill, number
from normkit.spec import NormSpec


class ScaleNorm(nn.Module):
    r"""ScaleNorm (Nguyen and Salazar 2019, arXiv:1910.05895): ``y = weight * x / max(||x||_2, eps)``.

    Args:
        features: C, the number of features; the scalar weight starts at its square root.
        eps: the smallest norm that is divided by.
        elementwise_affine: whether to learn the scalar weight.
        device: where the parameter lives.
        dtype: its dtype.
        channel_dim: 1 for channels-first input ``(N, C, ...)``.

    Shape:
        ``(*, C)`` in and out; ``(N, C, ...)`` with ``channel_dim=1``.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: the length is formed in float32, the result rounded once. torch.nn has no such layer.
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        channel_dim: int = -1,
    ) -> None:
        super().__init__()
        self.features = count("features", features)
        self.spec: NormSpec = E.scale_spec(eps, elementwise_affine, channel_dim)
        self.channel_dim = channel_dim
        self.register_parameter("weight", empty((1,), device, dtype) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight at sqrt(features), as in the paper: then the output starts with mean square 1."""
        fill(self.weight, math.sqrt(self.features))

    def forward(self, input: Tensor) -> Tensor:
        _check_features(input, self.features, self.spec)
        return E.scale_norm(input, self.weight, eps=self.spec.eps, channel_dim=self.channel_dim)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.spec.eps}, elementwise_affine={self.weight is not None}"


class L2Norm(nn.Module):
    r"""L2 normalization: ``y = x / max(||x||_2, eps)``, with a gain for each channel if asked (arXiv:1506.04579).

    Args:
        features: None for no gain, or C, the number of channels with a gain each.
        eps: the smallest norm that is divided by.
        device: where the parameter lives.
        dtype: its dtype.
        init: where the gains start.
        channel_dim: 1 for channels-first input ``(N, C, ...)``.

    Shape:
        ``(*, C)`` in and out; ``(N, C, ...)`` with ``channel_dim=1``.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: the length is formed in float32, the result rounded once. Differs from
    `torch.nn.functional.normalize`: see `normkit.functional.other.l2_norm`. Llama 4's "L2Norm" is not this: it divides
    by the root of the mean, so it is a weightless RMSNorm.
    """

    def __init__(
        self,
        features: int | None = None,
        eps: float = 1e-12,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        init: float = 1.0,
        channel_dim: int = -1,
    ) -> None:
        super().__init__()
        self.features = None if features is None else count("features", features)
        self.init = number("init", init)
        self.spec: NormSpec = E.l2_spec(eps, features is not None, channel_dim)
        self.channel_dim = channel_dim
        self.register_parameter("weight", None if features is None else empty((features,), device, dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gains at ``init``."""
        fill(self.weight, self.init)

    def forward(self, input: Tensor) -> Tensor:
        return E.l2_norm(input, self.weight, eps=self.spec.eps, channel_dim=self.channel_dim)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.spec.eps}, channel_dim={self.channel_dim}"


class PixelNorm(nn.Module):
    r"""Pixelwise feature normalization (Karras et al. 2017, arXiv:1710.10196): ``y = x / sqrt(mean_C(x^2) + eps)``.

    Args:
        eps: added to the mean square.

    Shape:
        ``(N, C, ...)`` in and out.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: the mean square is formed in float32, the result rounded once. Differs from `torch.nn.RMSNorm`: it
    has no weight, and runs over channels-first input.
    """

    def __init__(self, eps: float = 1e-8) -> None:
        super().__init__()
        self.spec: NormSpec = E.PIXEL_NORM.replace(eps=eps)

    def forward(self, input: Tensor) -> Tensor:
        return E.pixel_norm(input, eps=self.spec.eps)

    def extra_repr(self) -> str:
        return f"eps={self.spec.eps}"


def _check_features(x: Tensor, features: int, spec: NormSpec) -> None:
    """A scalar weight fits any width, so the promised one is checked here."""
    check_floating("input", x)
    assert isinstance(spec.channel_dim, int)
    if x.dim() > spec.channel_dim and x.dim() > 0 and x.shape[spec.channel_dim] != features:
        raise ValueError(f"features={features} must equal dim {spec.channel_dim} of input; got {tuple(x.shape)}")
