"""LayerNorm and RMSNorm: torch.nn's constructors and state_dict keys, every convention by keyword."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normkit import functional as F
from normkit.checks import check_dtype, check_number
from normkit.functional import as_shape, short
from normkit.functional.core import make_spec
from normkit.spec import NormSpec, OutputDtype, Rounding, check_eps


class _RowNorm(nn.Module):
    """What LayerNorm and RMSNorm share: shape, parameters, printing."""

    normalized_shape: tuple[int, ...]
    eps: float | None
    elementwise_affine: bool
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    _centered: bool

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        elementwise_affine: bool,
        bias: bool,
        weight_offset: float,
        rounding: Rounding,
        output_dtype: OutputDtype,
        channel_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        partial: float = 1.0,
    ) -> None:
        super().__init__()
        if eps is not None:
            check_eps(eps)
        check_dtype(dtype)
        self.normalized_shape = as_shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight_offset = check_number("weight_offset", weight_offset)
        self.rounding: Rounding = rounding
        self.output_dtype: OutputDtype = output_dtype
        self.channel_dim = channel_dim
        self.partial = partial
        if channel_dim not in (-1, 1) or (channel_dim == 1 and len(self.normalized_shape) != 1):
            raise ValueError(
                f"channel_dim must be -1, or 1 with one feature dim; got {channel_dim!r} with normalized_shape "
                f"{self.normalized_shape}"
            )

        def parameter() -> nn.Parameter:
            return nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))

        self.register_parameter("weight", parameter() if elementwise_affine else None)
        self.register_parameter("bias", parameter() if elementwise_affine and bias else None)
        _ = self.spec  # validates
        self.reset_parameters()

    @property
    def spec(self) -> NormSpec:
        """What this module computes. (``eps=None`` is that of float32 and of half-precision input.)"""
        last = -1 if len(self.normalized_shape) == 1 else tuple(range(-len(self.normalized_shape), 0))
        return make_spec(
            channel_dim=last if self.channel_dim == -1 else self.channel_dim,
            partial=self.partial,
            centered=self._centered,
            eps=torch.finfo(torch.float32).eps if self.eps is None else self.eps,
            has_weight=self.weight is not None,
            weight_offset=self.weight_offset if self.weight is not None else 0.0,
            has_bias=self.bias is not None,
            rounding=self.rounding,
            output_dtype=self.output_dtype,
        )

    def reset_parameters(self) -> None:
        """Gain 1 (a stored weight of 1 - weight_offset), bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        shown = [f"{self.normalized_shape}", f"eps={self.eps}", f"elementwise_affine={self.elementwise_affine}"]
        if self._centered or self.bias is not None:  # as torch's, whose RMSNorm has none
            shown.append(f"bias={self.bias is not None}")
        defaults = {"weight_offset": 0.0, "rounding": "after_gain", "output_dtype": "input", "channel_dim": -1}
        defaults["partial"] = 1.0
        shown += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(shown)


class LayerNorm(_RowNorm):
    r"""Layer normalization (Ba et al. 2016, arXiv:1607.06450) as a module.

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``

    Args:
        normalized_shape: the trailing feature dims of the input.
        eps: added to the variance.
        elementwise_affine: whether to learn a gain (and a bias).
        bias: whether to learn a bias.
        device: where the parameters live.
        dtype: the parameters' dtype.
        weight_offset: added to the stored weight, which then starts at ``1 - weight_offset``.
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        output_dtype: ``"input"``, ``"promoted"`` or ``"weight"``; see `normkit.NormSpec`.
        channel_dim: 1 for channels-first input ``(N, C, ...)``.

    Shape:
        ``(*, normalized_shape)`` in and out; ``(N, C, ...)`` with ``channel_dim=1``.

    Raises:
        ValueError: an argument outside its domain.

    Differs from `torch.nn.LayerNorm`: see `normkit.functional.layer_norm`. Same state_dict.
    """

    _centered = True

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        rounding: Rounding = "after_gain",
        output_dtype: OutputDtype = "input",
        channel_dim: int = -1,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            bias,
            weight_offset,
            rounding,
            output_dtype,
            channel_dim,
            device,
            dtype,
        )

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize; with ``residual``, normalize the sum and return ``(y, stream)``."""
        own = self._parameters  # an attribute of a module costs a tenth of the call; a parametrized one is not here
        plain = residual is None and self.channel_dim == -1 and self.output_dtype == "input"
        if plain and "weight" in own and "bias" in own:
            y = short.row(True, input, own["weight"], own["bias"], self.eps, self.weight_offset, self.rounding)
            if y is not None:
                return y
        assert self.eps is not None
        return F.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            output_dtype=self.output_dtype,
            channel_dim=self.channel_dim,
            residual=residual,
        )


class RMSNorm(_RowNorm):
    r"""Root mean square normalization (Zhang and Sennrich 2019, arXiv:1910.07467) as a module.

    ``y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight) + bias``

    Args:
        normalized_shape: the trailing feature dims of the input.
        eps: added to the mean square; None is the machine epsilon of the compute dtype.
        elementwise_affine: whether to learn a gain.
        device: where the parameters live.
        dtype: the parameters' dtype.
        bias: whether to learn a bias.
        weight_offset: 1.0 for Gemma's convention; the stored weight starts at ``1 - weight_offset``.
        rounding: where a half-precision result is rounded: ``"before_gain"`` for Llama; see `normkit.NormSpec`.
        output_dtype: ``"input"``, ``"promoted"`` or ``"weight"``; see `normkit.NormSpec`.
        channel_dim: 1 for channels-first input ``(N, C, ...)``.
        partial: the leading share of the features that enters the statistic.

    Shape:
        ``(*, normalized_shape)`` in and out; ``(N, C, ...)`` with ``channel_dim=1``.

    Raises:
        ValueError: an argument outside its domain.

    Differs from `torch.nn.RMSNorm`: see `normkit.functional.rms_norm`. Same state_dict.
    """

    _centered = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        weight_offset: float = 0.0,
        rounding: Rounding = "after_gain",
        output_dtype: OutputDtype = "input",
        channel_dim: int = -1,
        partial: float = 1.0,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            bias,
            weight_offset,
            rounding,
            output_dtype,
            channel_dim,
            device,
            dtype,
            partial,
        )

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize; with ``residual``, normalize the sum and return ``(y, stream)``."""
        own = self._parameters  # an attribute of a module costs a tenth of the call; a parametrized one is not here
        plain = residual is None and self.channel_dim == -1 and self.output_dtype == "input" and self.partial == 1
        if plain and "weight" in own and "bias" in own:
            y = short.row(False, input, own["weight"], own["bias"], self.eps, self.weight_offset, self.rounding)
            if y is not None:
                return y
        return F.rms_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.eps,
            bias=self.bias,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            output_dtype=self.output_dtype,
            channel_dim=self.channel_dim,
            partial=self.partial,
            residual=residual,
        )
