"""Prediction: a spec is reported only if the reference, given the module's own tensors, gives its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normkit.audit.identify.parameters import Use, all_finite
from normkit.audit.identify.probe import LARGE, NotANorm, Probe
from normkit.audit.identify.statistic import crossing_scale
from normkit.reference import normalize
from normkit.spec import NormSpec

_TOLERANCE = 2e-4


@dataclass
class Binding:
    """Which of the module's tensors is the reference's weight, bias, running mean and running variance."""

    probe: Probe
    rank: int
    uses: dict[str, Use] = field(default_factory=dict)
    residual: bool = False

    def name(self, role: str) -> str | None:
        """The tensor's name in the module."""
        use = self.uses.get(role)
        return None if use is None else use.slot.name

    def tensors(self, spec: NormSpec, dtype: torch.dtype) -> dict[str, Tensor]:
        """The reference's arguments, from the values that the slots have while probing."""
        given: dict[str, Tensor] = {}
        for argument, use in self.uses.items():
            value = use.slot.base.to(dtype)
            if argument == "weight" and spec.weight_shape == "scalar":
                given[argument] = value.reshape(1)
            elif spec.weight_shape == "per_head" and use.dims == self.uses["weight"].dims:
                first, last = use.dims[0], self.rank - 1
                given[argument] = value.reshape(self._sizes(use, range(first, last + 1)))
            else:
                given[argument] = value.reshape(self._sizes(use, use.dims) or [1])
        if "running_var" in given and "running_mean" not in given:
            given["running_mean"] = torch.zeros_like(given["running_var"])
        return given

    def _sizes(self, use: Use, dims: Iterable[int]) -> list[int]:
        sizes = dict(zip(use.dims, use.sizes, strict=True))
        return [sizes.get(d, 1) for d in dims]

    def dummies(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """(weight, bias) of a dtype, or None: what decides the output dtype."""
        one = torch.ones((), dtype=dtype)
        return one if "weight" in self.uses else None, one if "bias" in self.uses else None

    def redraw(self) -> None:
        """Other values for the gain, the bias and the stored statistics (a scalar keeps its own)."""
        for use in self.uses.values():
            if use.slot.tensor.numel() > 1:
                use.slot.base = self.probe.uniform(use.slot.tensor.shape)
        self.probe.reset()

    def predict(self, x: Tensor, spec: NormSpec, second: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The reference's output for the module's tensors in a dtype."""
        given = self.tensors(spec, dtype)
        if self.residual and second is not None:
            x = x + second
        gate = second if spec.gate is not None else None
        return normalize(
            x,
            spec,
            given.get("weight"),
            given.get("bias"),
            gate=gate,
            running_mean=given.get("running_mean"),
            running_var=given.get("running_var"),
        )


def verify(binding: Binding, spec: NormSpec, shape: tuple[int, ...]) -> None:
    """Compare module and reference on fresh inputs of several magnitudes.

    Raises:
        NotANorm: they differ by more than float32 rounding explains.
    """
    probe = binding.probe
    probe.reset()
    for scale in (1.0, LARGE, crossing_scale(spec.eps, spec.eps_at)):
        x = probe.random(shape) * scale
        second = None
        if probe.second is not None:
            second = probe.random(shape) * (scale if binding.residual else 2.0)
        y = probe(x, second).double()
        expected = binding.predict(x, spec, second, torch.float32).double()
        if not all_finite(y):
            raise NotANorm(f"inputs of scale {scale:.1g} give outputs that are not finite")
        wrong = float((y - expected).abs().max())
        if wrong > _TOLERANCE * (float(y.abs().max()) + 1e-30):
            raise NotANorm(f"inputs of scale {scale:.1g} give outputs that the spec does not predict")
