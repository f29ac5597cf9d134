"""Norms whose gain comes from a condition or from the input: AdaLayerNorm, adaLN-Zero, SeeDNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.checks import check_floating
from normkit.functional import norm
from normkit.functional import other as E
from normkit.nn._shared import Device, count, empty, fill, number
from normkit.spec import NormSpec


class _Conditioned(nn.Module):
    """A weightless norm, and a linear map from the condition to ``_parts`` vectors of features."""

    _parts: int

    def __init__(
        self,
        features: int,
        condition_features: int,
        eps: float,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
        centered: bool,
    ) -> None:
        super().__init__()
        self.features = count("features", features)
        self.condition_features = count("condition_features", condition_features)
        self.spec = NormSpec(centered=centered, eps=eps, has_weight=False)
        self.linear = nn.Linear(condition_features, self._parts * features, bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The linear map at zero: shift, scale and gate start at 0."""
        fill(self.linear.weight, 0.0)
        fill(self.linear.bias, 0.0)

    def _modulated(self, x: Tensor, condition: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The modulated norm of x, and the vectors that the condition gives, in float32 at least."""
        check_floating("input", x)
        check_floating("condition", condition)
        for name, value in (("input", x), ("condition", condition)):
            if value.device != self.linear.weight.device:
                raise ValueError(
                    f"{name} is on {value.device} but the weights are on {self.linear.weight.device}; move one"
                )
        if x.dim() < 1 or x.shape[-1] != self.features:
            raise ValueError(f"the last dim of input must be features={self.features}; got shape {tuple(x.shape)}")
        if condition.dim() < 1 or condition.shape[-1] != self.condition_features:
            raise ValueError(
                f"the last dim of condition must be condition_features={self.condition_features}; "
                f"got shape {tuple(condition.shape)}"
            )
        vectors = list(
            E.linear(nn.functional.silu(condition), self.linear.weight, self.linear.bias).chunk(self._parts, -1)
        )
        y = E.modulate(norm(E.upcast(x), self.spec), vectors[0], vectors[1])
        return y.to(x.dtype), vectors

    def extra_repr(self) -> str:
        return f"{self.features}, {self.condition_features}, eps={self.spec.eps}, centered={self.spec.centered}"


class AdaLayerNorm(_Conditioned):
    r"""Adaptive layer normalization (DiT: Peebles and Xie 2022, arXiv:2212.09748).

    ``shift, scale = Linear(silu(condition))``; ``y = LN(x) * (1 + scale) + shift``, with a weightless LN

    Args:
        features: C, the number of features of the input.
        condition_features: E, the number of features of the condition.
        eps: added to the variance.
        bias: whether the linear map has a bias.
        device: where the parameters live.
        dtype: their dtype.
        centered: False for an RMSNorm in place of the LayerNorm.

    Shape:
        x ``(B, ..., C)``; condition ``(B, E)``, or ``(B, T, E)`` for one a token. The result has x's shape.

    Raises:
        ValueError, TypeError: an argument outside its domain, or inputs that do not fit.

    Half precision: the linear map runs in the wider dtype of condition and weight; norm and modulation in float32,
    rounded once. Starts as the plain norm (the linear map is zero). Differs from `torch.nn.LayerNorm`: gain and bias
    are functions of the condition. ``spec`` is the weightless norm inside.
    """

    _parts = 2

    def __init__(
        self,
        features: int,
        condition_features: int,
        eps: float = 1e-6,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        centered: bool = True,
    ) -> None:
        super().__init__(features, condition_features, eps, bias, device, dtype, centered)

    def forward(self, input: Tensor, condition: Tensor) -> Tensor:
        return self._modulated(input, condition)[0]


class AdaLayerNormZero(_Conditioned):
    r"""adaLN-Zero (DiT: Peebles and Xie 2022, arXiv:2212.09748): also gives the gate of the residual branch.

    ``shift, scale, gate = Linear(silu(condition))``; ``y = LN(x) * (1 + scale) + shift``; use as ``x + gate * F(y)``

    Args:
        features: C, the number of features of the input.
        condition_features: E, the number of features of the condition.
        eps: added to the variance.
        bias: whether the linear map has a bias.
        device: where the parameters live.
        dtype: their dtype.
        centered: False for an RMSNorm in place of the LayerNorm.

    Shape:
        x ``(B, ..., C)``; condition ``(B, E)``, or ``(B, T, E)`` for one a token. Returns y of x's shape, and the gate,
        which broadcasts against it: ``(B, 1, ..., C)``.

    Raises:
        ValueError, TypeError: an argument outside its domain, or inputs that do not fit.

    Half precision: as `AdaLayerNorm`; the gate has x's dtype. The linear map starts at zero, so the gate does, and
    every block starts as the identity. Differs from `torch.nn.LayerNorm` as `AdaLayerNorm` does. A DiT block's
    ``adaLN_modulation`` holds two of these: rows ``[0, 3C)`` for attention, ``[3C, 6C)`` for the MLP, each in the order
    shift, scale, gate.
    """

    _parts = 3

    def __init__(
        self,
        features: int,
        condition_features: int,
        eps: float = 1e-6,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        centered: bool = True,
    ) -> None:
        super().__init__(features, condition_features, eps, bias, device, dtype, centered)

    def forward(self, input: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """The modulated norm, and the gate."""
        y, vectors = self._modulated(input, condition)
        return y, E.per_sample("gate", vectors[2], y)


class SeeDNorm(nn.Module):
    r"""Self-rescaled dynamic normalization (Cai et al. 2025, arXiv:2510.22777).

    ``y = (tanh(x . beta) * alpha + weight) * x / sqrt(mean(x^2) + eps)``; with several heads, ``x . beta`` is one dot
    product for each of ``heads`` equal parts of the features.

    Args:
        features: C, the number of features.
        eps: added to the mean square.
        elementwise_affine: whether to learn the static gain ``weight`` (``alpha`` and ``beta`` always are).
        device: where the parameters live.
        dtype: their dtype.
        heads: the number of parts with a dot product each.
        alpha_init: where ``alpha`` starts.

    Shape:
        ``(*, C)`` in and out.

    Raises:
        ValueError, TypeError: an argument outside its domain.

    Half precision: computed in float32, rounded once. Differs from `torch.nn.RMSNorm`: the gain depends on the input,
    so the output keeps a trace of its length. ``beta`` starts at 0, so the layer starts as an RMSNorm; the paper starts
    ``alpha`` at 1 in language models, and uses several heads in vision. ``spec`` is the norm inside.
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        heads: int = 1,
        alpha_init: float = 1.0,
    ) -> None:
        super().__init__()
        self.features = count("features", features)
        self.heads = count("heads", heads)
        if features % heads:
            raise ValueError(f"heads={heads} does not divide features {features}")
        self.alpha_init = number("alpha_init", alpha_init)
        self.spec = NormSpec(centered=False, eps=eps, has_weight=elementwise_affine)
        self.register_parameter("weight", empty((features,), device, dtype) if elementwise_affine else None)
        self.alpha = empty((features,), device, dtype)
        self.beta = empty((features,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 1, ``alpha`` at ``alpha_init``, ``beta`` 0: an RMSNorm."""
        fill(self.weight, 1.0)
        fill(self.alpha, self.alpha_init)
        fill(self.beta, 0.0)

    def forward(self, input: Tensor) -> Tensor:
        return E.seed_norm(input, self.weight, self.alpha, self.beta, self.spec.eps, heads=self.heads)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.spec.eps}, heads={self.heads}"
