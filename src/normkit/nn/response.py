"""Norms of a filter's response: FilterResponseNorm with its thresholded unit, GlobalResponseNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.functional import other as E
from normkit.nn._shared import Device, count, empty, fill, number
from normkit.spec import NormSpec, check_eps


class FilterResponseNorm(nn.Module):
    r"""Filter response normalization with a thresholded linear unit (Singh and Krishnan 2019, arXiv:1911.09737).

    ``y = max(weight * x / sqrt(mean_space(x^2) + eps + |learned_eps|) + bias, tau)``

    Args:
        num_features: C, the number of channels.
        eps: the fixed part of the stabilizer.
        elementwise_affine: whether to learn gain and bias.
        device: where the parameters live.
        dtype: their dtype.
        tlu: whether the threshold ``tau`` (starting at 0, then a ReLU) is applied.
        learned_eps: None, or where a learned addition to ``eps`` starts; for activations of few positions (a 1x1 map
            divides each value by itself), where the paper learns it from 1e-4.

    Shape:
        ``(N, C, ...)`` in and out, with at least one space dim. ``mask``: ``(N, ...)``, True at valid positions.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: computed in float32, rounded once. Differs from `torch.nn.InstanceNorm2d`: the mean is not removed
    and the activation is part of the layer. ``spec`` describes the norm without the threshold.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        tlu: bool = True,
        learned_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.num_features = count("num_features", num_features)
        affine = elementwise_affine
        self.spec: NormSpec = E.FILTER_RESPONSE.replace(eps=eps, has_weight=affine, has_bias=affine)
        self.eps_init = None if learned_eps is None else number("learned_eps", learned_eps, 0.0)
        shape = (num_features,)
        self.register_parameter("weight", empty(shape, device, dtype) if affine else None)
        self.register_parameter("bias", empty(shape, device, dtype) if affine else None)
        self.register_parameter("tau", empty(shape, device, dtype) if tlu else None)
        self.register_parameter("learned_eps", None if learned_eps is None else empty((1,), device, dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 1, bias 0, threshold 0, the learned eps at its start."""
        fill(self.weight, 1.0)
        fill(self.bias, 0.0)
        fill(self.tau, 0.0)
        if self.eps_init is not None:
            fill(self.learned_eps, self.eps_init)

    def forward(self, input: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Normalize; masked positions do not count, and their output is zero."""
        return E.filter_response_norm(
            input, self.weight, self.bias, self.tau, self.spec.eps, learned_eps=self.learned_eps, mask=mask
        )

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.spec.eps}, tlu={self.tau is not None}, learned_eps={self.eps_init}"


class TLU(nn.Module):
    r"""Thresholded linear unit (Singh and Krishnan 2019, arXiv:1911.09737): ``y = max(x, tau)``, one tau a channel.

    Args:
        num_features: C, the number of channels.
        device: where the parameter lives.
        dtype: its dtype.

    Shape:
        ``(N, C, ...)`` in and out.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Differs from `torch.nn.ReLU`: the threshold is learned.
    """

    def __init__(self, num_features: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.num_features = count("num_features", num_features)
        self.tau = empty((num_features,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The threshold at 0: a ReLU."""
        fill(self.tau, 0.0)

    def forward(self, input: Tensor) -> Tensor:
        z = E.upcast(input)
        return torch.maximum(z, E.per_feature("tau", self.tau, z, 1)).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}"


class GlobalResponseNorm(nn.Module):
    r"""Global response normalization (ConvNeXt V2, Woo et al. 2023, arXiv:2301.00808).

    ``G_c = ||x_c||_2`` over space, ``N_c = G_c / (mean_C(G) + eps)``, ``y = weight * (x * N) + bias + x``

    Args:
        num_features: C, the number of channels.
        eps: added to the mean response.
        elementwise_affine: whether to learn gain and bias; without them the gain is 1.
        device: where the parameters live.
        dtype: their dtype.
        channel_dim: -1 for ``(N, H, W, C)``, the authors' layout, or 1.

    Shape:
        ``(N, H, W, C)`` in and out, any number of space dims; ``(N, C, H, W)`` with ``channel_dim=1``.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: computed in float32, rounded once. torch.nn has no such layer. Gain and bias start at 0, so that the
    layer starts as the identity; they have shape ``(C,)`` where the authors' checkpoints hold ``(1, 1, 1, C)``.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        channel_dim: int = -1,
    ) -> None:
        super().__init__()
        check_eps(eps)
        if channel_dim not in (-1, 1):
            raise ValueError(f"channel_dim must be -1 or 1; got {channel_dim!r}")
        self.num_features = count("num_features", num_features)
        self.eps = eps
        self.channel_dim = channel_dim
        for name in ("weight", "bias"):
            self.register_parameter(name, empty((num_features,), device, dtype) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain and bias 0: the identity."""
        fill(self.weight, 0.0)
        fill(self.bias, 0.0)

    def forward(self, input: Tensor) -> Tensor:
        return E.global_response_norm(input, self.weight, self.bias, self.eps, channel_dim=self.channel_dim)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, channel_dim={self.channel_dim}"
