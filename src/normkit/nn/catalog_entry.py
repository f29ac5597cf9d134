"""What one line of the catalog of norms holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A norm, ready to be built and called."""

    name: str
    build: Callable[..., nn.Module]
    """Takes device= and dtype= where the module has parameters."""
    shapes: tuple[Shape, ...]
    """The shapes of the positional inputs; the first is x."""
    stateful: bool = False
    """Training moves buffers."""
    has_parameters: bool = True
    batch_dim: int = 0
    """The dim of x along which entries never meet in evaluation, so that a NaN stays its own."""

    exact_gradient: bool = True
    """False where the gradient is not the derivative, by design (PowerNorm)."""

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0, **options: object) -> tuple[Tensor, ...]:
        """Standard normal inputs, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes)
        return tuple(t.to(dtype=dtype, **options) for t in drawn)  # type: ignore[call-overload]

    def make(self, dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
        """The module, with parameters of ``dtype``."""
        return self.build(dtype=dtype, **options) if self.has_parameters else self.build()
