"""What is measured when a model runs on data: plain numbers for each norm, residual branch and attention.

All figures are over every position of every batch, padding included. RMS is the root of the mean square over all
elements; a channel is one index of the norm's ``channel_dim``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

DEAD = 0.01
"""A gain at most this share of the norm's median gain is dead: its channel is all but switched off."""
OUTLIER = 10.0
"""A gain, or a channel's RMS, at least this many times the norm's median is an outlier: a risk when quantized."""


@dataclass(frozen=True, kw_only=True)
class GainNumbers:
    """The effective gain ``weight_offset + weight`` of a norm, by magnitude."""

    channels: int
    min: float
    median: float
    max: float
    dead: tuple[int, ...] = ()
    """Channels (indices into the flattened gain) with ``|gain| <= DEAD * median``."""
    outliers: tuple[int, ...] = ()
    """Channels with ``|gain| >= OUTLIER * median``."""


@dataclass(frozen=True, kw_only=True)
class NormNumbers:
    """One norm of the audit, over all its calls."""

    name: str
    """As in `NormRecord.name`."""
    input_rms: float
    """RMS of what it normalizes. For a pre-norm this is the residual stream at its depth."""
    input_max: float
    """Largest magnitude of what it normalizes."""
    output_rms: float
    nonfinite: int = 0
    """Elements of the input that are NaN or infinite; they enter no other figure."""
    outlier_ratio: float = 1.0
    """The largest channel RMS of the input over the median channel's."""
    outlier_channels: tuple[int, ...] = ()
    """Input channels whose RMS is at least ``OUTLIER`` times the median channel's."""
    gain: GainNumbers | None = None
    """None where the norm has no gain."""
    gradient_rms: float | None = None
    """RMS of the gradient at the norm's input (see `Numbers.gradient_of`); None where none reaches it."""
    channel_mean: Tensor | None = field(default=None, repr=False, compare=False)
    """Mean of each input channel, ``(C,)``, float64; in memory only."""
    channel_var: Tensor | None = field(default=None, repr=False, compare=False)
    """Biased variance of each input channel, ``(C,)``, float64; in memory only."""


@dataclass(frozen=True, kw_only=True)
class BranchNumbers:
    """One residual branch, where it is added: ``sum = identity + branch``."""

    name: str
    stream: int
    depth: int
    """0 for the first branch of its stream, in order of execution."""
    stream_rms: float
    """RMS of the identity operand: the stream before the branch is added."""
    branch_rms: float
    """RMS of what is added (after any scale and output norm)."""
    share: float
    """``branch_rms / (branch_rms + stream_rms)``: 0 adds nothing, 1/2 as much as was there."""


@dataclass(frozen=True, kw_only=True)
class AttentionNumbers:
    """One attention: the products of queries and keys, scaled, before mask, position bias and soft cap."""

    name: str
    """The module that computes it."""
    logit_max: float
    """Largest magnitude of a product that a softmax takes; past about 50 to 100 training tends to break."""
    qk_norm: bool
    """Whether a norm of its queries or keys bounds the products."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Everything measured on data."""

    norms: tuple[NormNumbers, ...] = ()
    branches: tuple[BranchNumbers, ...] = ()
    attentions: tuple[AttentionNumbers, ...] = ()
    batches: int = 0
    gradient_of: str | None = None
    """What was differentiated: ``"loss"`` (the output has one), or ``"random projection"``: the sum of the outputs
    times standard normal numbers, over the root of their count. None: no gradients."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    def norm(self, name: str) -> NormNumbers | None:
        """The numbers of the norm of that name."""
        return next((n for n in self.norms if n.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a figure that is not finite is None."""
        return _plain(self)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | type(None)):
        return value
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if not f.name.startswith("channel_")}
