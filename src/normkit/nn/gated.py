"""GatedRMSNorm: an RMSNorm multiplied by the activation of a second input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.checks import check_floating
from normkit.functional import norm
from normkit.nn._shared import Device, count, empty, fill
from normkit.spec import GateFunction, GatePosition, NormSpec, OutputDtype, Rounding


class GatedRMSNorm(nn.Module):
    r"""Gated RMSNorm (Mamba 2: Dao and Gu 2024, arXiv:2405.21060).

    ``gate_position="before"``: ``y = RMS(x * act(gate)) * weight``; ``"after"``: ``y = RMS(x) * weight * act(gate)``

    Args:
        features: C, the number of features.
        eps: added to the mean square.
        elementwise_affine: whether to learn a gain.
        device: where the parameter lives.
        dtype: its dtype.
        gate_function: ``"silu"`` or ``"sigmoid"``.
        gate_position: ``"before"`` the statistic (Mamba 2) or ``"after"`` the gain (Qwen3-Next).
        groups: the number of equal parts of the features with a statistic each (Mamba 2's ``n_groups``).
        weight_offset: added to the stored weight, which then starts at ``1 - weight_offset``.
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        output_dtype: ``"promoted"``: input with weight (Mamba 2); ``"input"`` (Qwen3-Next).

    Shape:
        x and gate ``(*, C)``; the result too. Without a gate, the plain (grouped) RMSNorm.

    Raises:
        ValueError, TypeError: an argument outside its domain, or a gate of another shape.

    Half precision: gate and statistic in float32. Conventions of the model families, bit for bit in bfloat16::

        Mamba 2, Bamba, Zamba 2, NemotronH   the defaults, with groups
        Qwen3-Next, OLMo hybrid              gate_position="after", output_dtype="input"
        Kimi Linear                          gate_function="sigmoid", gate_position="after", rounding="after_gain",
                                             output_dtype="input"
        Falcon H1                            rounding="after_gain", output_dtype="input", either position

    Differs from `torch.nn.RMSNorm`: the gate, the groups and the rounding.
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        gate_function: GateFunction = "silu",
        gate_position: GatePosition = "before",
        groups: int = 1,
        weight_offset: float = 0.0,
        rounding: Rounding = "before_gain",
        output_dtype: OutputDtype = "promoted",
    ) -> None:
        super().__init__()
        self.features = count("features", features)
        if features % count("groups", groups):
            raise ValueError(f"groups={groups} does not divide features {features}")
        self.spec = NormSpec(
            centered=False,
            eps=eps,
            groups=groups,
            has_weight=elementwise_affine,
            weight_offset=weight_offset if elementwise_affine else 0.0,
            rounding=rounding,
            output_dtype=output_dtype,
            gate=(gate_function, gate_position),
        )
        self.register_parameter("weight", empty((features,), device, dtype) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 1 (a stored weight of 1 - weight_offset)."""
        fill(self.weight, 1.0 - self.spec.weight_offset)

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize and gate; without a gate, only normalize."""
        check_floating("input", input)
        if input.dim() < 1 or input.shape[-1] != self.features:
            raise ValueError(f"the last dim of input must be features={self.features}; got shape {tuple(input.shape)}")
        spec = self.spec if gate is not None else self.spec.replace(gate=None)
        return norm(input, spec, self.weight, gate=gate)

    def extra_repr(self) -> str:
        s = self.spec
        return f"{self.features}, eps={s.eps}, gate={s.gate}, groups={s.groups}, rounding={s.rounding!r}"
