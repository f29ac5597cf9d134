"""What a swap knows of each norm on its way, and what the caller asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from normkit.audit import NormRecord
from normkit.convert.receipt import Errors
from normkit.convert.swap.plan import Plan
from normkit.convert.swap.probe import Sample


@dataclass
class Norm:
    """One norm on its way."""

    record: NormRecord
    module: nn.Module
    plan: Plan
    base: type[nn.Module]
    sample: Sample | None = None
    errors: Errors | None = None
    flips: float = 0.0
    """The share of half-precision outputs with other bits, where a kernel rounds once and the original more often."""
    change: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self.record.name


class Reclassed(Protocol):
    """A module on its way to another class, or with it."""

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def base(self) -> type[nn.Module]: ...


@dataclass(frozen=True)
class Options:
    """`swap`'s arguments; see there."""

    strict: float | None
    only_faster: bool
    same_rounding: bool
    gradients: bool
    float64: bool | None
    rounds: int
    fuse_residual: bool = False
