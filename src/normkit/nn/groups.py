"""GroupNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit import functional as F
from normkit.checks import check_count, check_dtype, check_floating, check_number
from normkit.functional.core import make_spec
from normkit.spec import NormSpec, Rounding, check_eps


class GroupNorm(nn.Module):
    r"""Group normalization (Wu and He 2018, arXiv:1803.08494) as a module.

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``, mean and biased variance per sample over
    space and one of ``num_groups`` equal parts of the channels.

    Args:
        num_groups: divides ``num_channels``.
        num_channels: C.
        eps: added to the variance.
        affine: whether to learn a gain and a bias.
        device: where the parameters live.
        dtype: the parameters' dtype.
        bias: whether ``affine`` learns a bias.
        weight_offset: added to the stored weight, which then starts at ``1 - weight_offset``.
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        channel_dim: 1, or -1 for channels-last input.

    Shape:
        ``(N, C)`` or ``(N, C, ...)`` in and out; ``(N, ..., C)`` with ``channel_dim=-1``.

    Raises:
        ValueError: num_groups that does not divide num_channels, or another argument outside its domain.

    Differs from `torch.nn.GroupNorm`: the keyword-only arguments, ``mask`` and ``residual`` are new; see
    `normkit.functional.group_norm` for the numbers. Same state_dict.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        weight_offset: float = 0.0,
        rounding: Rounding = "after_gain",
        channel_dim: int = 1,
    ) -> None:
        super().__init__()
        check_eps(eps)
        check_dtype(dtype)
        num_channels = check_count("num_channels", num_channels, least=0)
        num_groups = check_count("num_groups", num_groups, least=0)
        if num_groups < 1 or num_channels % num_groups:
            fits = [g for g in range(1, num_channels + 1) if num_channels % g == 0]
            raise ValueError(
                f"num_groups={num_groups} must divide num_channels={num_channels}; {', '.join(map(str, fits))} do"
            )
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self.weight_offset = check_number("weight_offset", weight_offset)
        self.rounding: Rounding = rounding
        self.channel_dim = channel_dim

        def parameter() -> nn.Parameter:
            return nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))

        self.register_parameter("weight", parameter() if affine else None)
        self.register_parameter("bias", parameter() if affine and bias else None)
        _ = self.spec  # validates
        self.reset_parameters()

    @property
    def spec(self) -> NormSpec:
        """What this module computes."""
        return make_spec(
            axes="group",
            channel_dim=self.channel_dim,
            groups=self.num_groups,
            eps=self.eps,
            has_weight=self.weight is not None,
            weight_offset=self.weight_offset if self.weight is not None else 0.0,
            has_bias=self.bias is not None,
            rounding=self.rounding,
        )

    def reset_parameters(self) -> None:
        """Gain 1 (a stored weight of 1 - weight_offset), bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, input: Tensor, *, mask: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize; with ``residual``, normalize the sum and return ``(y, stream)``.

        Args:
            input: see Shape.
            mask: input's shape without the channel dim, True (or 1) at valid positions. Others do not count, have
                output zero and get no gradient.
            residual: added to input first.
        """
        check_floating("input", input)
        if input.dim() >= 2 and input.shape[self.channel_dim] != self.num_channels:
            raise ValueError(
                f"GroupNorm has num_channels={self.num_channels}, but input of shape {tuple(input.shape)} has "
                f"{input.shape[self.channel_dim]} channels at dim {self.channel_dim}"
            )
        return F.group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            mask=mask,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            channel_dim=self.channel_dim,
            residual=residual,
        )

    def extra_repr(self) -> str:
        shown = [f"{self.num_groups}", f"{self.num_channels}", f"eps={self.eps}", f"affine={self.affine}"]
        shown.append(f"bias={self.bias is not None}")
        defaults = {"weight_offset": 0.0, "rounding": "after_gain", "channel_dim": 1}
        shown += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(shown)
