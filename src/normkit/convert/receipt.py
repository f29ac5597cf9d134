"""The receipt that every conversion hands back: what was changed, what was refused and why, what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console


class ConversionError(Exception):
    """The conversion was not made, or cannot be undone; the message says why. The model is as it was."""


class Refusal(NamedTuple):
    """One thing that was left as it is."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two runs are apart: the largest deviation over the largest value. None: not measured."""

    outputs: float | None = None
    gradients: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready."""
        return {"outputs": self.outputs, "gradients": self.gradients}

    def worst(self) -> float:
        """The larger of both; 0 where nothing was measured."""
        return max(self.outputs or 0.0, self.gradients or 0.0, key=_size)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What a conversion changed, measured on probe inputs in the model's own dtype."""

    original: Difference
    """The converted against the original."""
    exact: Difference = field(default_factory=Difference)
    """The converted against the original in float64."""
    noise: Difference = field(default_factory=Difference)
    """The original against itself in float64: its own rounding."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"original": self.original.to_dict(), "exact": self.exact.to_dict(), "noise": self.noise.to_dict()}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of one call before and after: medians of interleaved rounds."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How many times faster."""
        return self.before / self.after

    def to_dict(self) -> dict[str, float]:
        """JSON-ready."""
        return {"before": self.before, "after": self.after, "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that was changed."""

    name: str
    what: str
    """What was done to it, in a few words."""
    errors: Errors | None = None
    speed: Speed | None = None
    backward_speed: Speed | None = None
    """Forward and backward together."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"name": self.name, "what": self.what, **_measured(self)}


@dataclass(kw_only=True)
class Receipt:
    """What a conversion did, and the proof."""

    conversion: str
    """``swap``, ``fold``, ..."""
    model: str
    """The model's class."""
    changed: tuple[Change, ...] = ()
    refused: tuple[Refusal, ...] = ()
    errors: Errors | None = None
    """Of the whole model."""
    speed: Speed | None = None
    backward_speed: Speed | None = None
    """A training step: forward and backward together."""
    notes: tuple[str, ...] = ()
    revert: Callable[[], None] | None = field(default=None, repr=False)
    """Puts everything back; None where there is no way back."""
    undone: bool = False

    def undo(self) -> None:
        """Put everything back, bit for bit. A second call does nothing.

        Raises:
            ConversionError: there is no way back, or something that happened since stands in it; nothing is changed.
        """
        if self.undone:
            return
        if self.revert is None:
            raise ConversionError(f"{self.conversion} of {self.model} cannot be undone: load the original again")
        self.revert()
        self.undone = True

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every change with its measurements, every refusal with its reason."""
        return {
            "conversion": self.conversion,
            "model": self.model,
            "changed": [c.to_dict() for c in self.changed],
            "refused": [r._asdict() for r in self.refused],
            "notes": list(self.notes),
            "undone": self.undone,
            **_measured(self),
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """`to_dict` as JSON text, also written to ``path`` if given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def show(self, console: Console | None = None) -> None:
        """Print it: one row for each kind of change, one for each reason, then the whole model."""
        from normkit.convert.terminal import show

        show(self, console)


def _measured(of: Change | Receipt) -> dict[str, Any]:
    return {
        "errors": None if of.errors is None else of.errors.to_dict(),
        "speed": None if of.speed is None else of.speed.to_dict(),
        "backward_speed": None if of.backward_speed is None else of.backward_speed.to_dict(),
    }


def deviation(got: Tensor, expected: Tensor) -> float:
    """The largest deviation over the largest expected value, both in float64.

    Values that are not finite must agree; infinity where they do not, or where shapes differ.
    """
    if got.shape != expected.shape:
        return torch.inf
    if expected.numel() == 0:
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(got), finite) or not torch.equal(
        got[~finite].nan_to_num(), expected[~finite].nan_to_num()
    ):
        return torch.inf
    got, expected = got.masked_fill(~finite, 0), expected.masked_fill(~finite, 0)
    wrong = float((got - expected).abs().max())
    return 0.0 if wrong == 0 else wrong / float(expected.abs().max().clamp_min(1e-300))


def deviations(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float | None:
    """The worst of several; None where there is nothing to compare, infinity where one side is missing."""
    if len(got) != len(expected):
        return torch.inf
    found: list[float] = []
    for a, b in zip(got, expected, strict=True):
        if a is None and b is None:
            continue
        found.append(torch.inf if a is None or b is None else deviation(a, b))
    return max(found, key=_size) if found else None


def worst(differences: Sequence[Difference]) -> Difference:
    """The largest of each field."""
    outputs = [d.outputs for d in differences if d.outputs is not None]
    gradients = [d.gradients for d in differences if d.gradients is not None]
    return Difference(
        outputs=max(outputs, key=_size) if outputs else None, gradients=max(gradients, key=_size) if gradients else None
    )


def _size(value: float) -> float:
    """NaN is larger than anything: a comparison that failed must not pass for a small one."""
    return torch.inf if value != value else value
