"""NormSpec: what a normalization computes, and the table of named conventions.

One frozen dataclass answers the first two questions about any norm: which elements share a statistic
(and is the mean removed), and in what precision, with which gain convention, the result is formed.
The same object builds a layer, reports what a foreign module does, chooses a kernel and converts a
checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

Axes = Literal["features", "batch", "instance", "group"]
Statistic = Literal["mean_square", "unbiased", "sum"]
EpsAt = Literal["variance", "std", "floor"]
WeightShape = Literal["features", "per_head", "scalar"]
GainDtype = Literal["float32", "input"]
Rounding = Literal["before_gain", "after_gain", "none"]
OutputDtype = Literal["input", "promoted", "weight"]
GateFunction = Literal["silu", "sigmoid"]
GatePosition = Literal["before", "after"]
Gate = tuple[GateFunction, GatePosition]
Running = float | Literal["cumulative"]
Kind = Literal["layer", "rms", "batch", "instance", "group", "l2", "other"]
KIND_NAMES: dict[Kind, str] = {
    "layer": "LayerNorm",
    "rms": "RMSNorm",
    "batch": "BatchNorm",
    "instance": "InstanceNorm",
    "group": "GroupNorm",
    "l2": "L2 norm",
    "other": "other",
}
"""What people call each kind."""

_CHOICES = {
    "axes": get_args(Axes),
    "statistic": get_args(Statistic),
    "eps_at": get_args(EpsAt),
    "weight_shape": get_args(WeightShape),
    "gain_dtype": get_args(GainDtype),
    "rounding": get_args(Rounding),
    "output_dtype": get_args(OutputDtype),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    r"""What a normalization computes.

    With :math:`S` the set of elements that share one statistic::

        c  = mean_S(x) if centered else 0
        s  = mean_S((x - c)^2)              statistic = "mean_square" ("unbiased": n - 1; "sum": no division)
        x̂  = (x - c) / sqrt(s + eps)        eps_at = "variance" ("std": sqrt(s) + eps; "floor": max(sqrt(s), eps))
        y  = x̂ * (weight_offset + weight) + bias

    Args:
        axes: which elements share a statistic. ``"features"``: the feature dims of one position (LayerNorm,
            RMSNorm); ``"batch"``: all but the channel; ``"instance"``: space, per sample and channel;
            ``"group"``: space and a group of channels, per sample.
        channel_dim: where the features or channels are: -1, 1, or (``"features"`` only) a tuple of trailing
            dims such as ``(-3, -2, -1)``.
        groups: for ``"group"`` the number of groups of channels; for ``"features"`` the number of equal parts
            that the features of one position are cut into (Mamba 2).
        partial: the leading share of the features that enters the statistic (pRMSNorm), in (0, 1].
        centered: whether the mean is removed.
        statistic: how the squares are averaged: by n, by n - 1, or not at all.
        eps: the stabilizer, >= 0.
        eps_at: where it enters.
        has_weight: whether a learned (or stored) gain multiplies the result.
        weight_offset: added to the stored weight: 1.0 where it is centred on zero (Gemma).
        has_bias: whether a bias is added.
        weight_shape: ``"features"``: one gain for each feature or channel; ``"per_head"``: a gain with more
            dims than the statistic; ``"scalar"``: one number (ScaleNorm).
        gain_dtype: where ``weight_offset + weight`` is formed: in float32, or in the stored weight's own
            dtype (Nemotron).
        rounding: where a half-precision result is rounded: ``"before_gain"``: float32 normalize, round, times
            weight (Llama, T5); ``"after_gain"``: all in float32, round once (Gemma, torch's kernels);
            ``"none"``: every step in the input's dtype.
        output_dtype: ``"input"``; ``"promoted"``: input with weight (Llama with float32 weights gives
            float32); ``"weight"``: the weight's own (T5).
        gate: None, or (``"silu"`` or ``"sigmoid"``, ``"before"`` or ``"after"``): a second input whose
            activation multiplies the normalization's input or output.
        running: None, or the momentum of the running statistics (``"cumulative"``: a plain average over
            batches). Batch and instance only.
        frozen: the stored statistics are always used and never updated (FrozenBatchNorm).

    Raises:
        ValueError: a field outside its domain, or fields that contradict one another; the message names the
            field, its value and what is accepted.
    """

    axes: Axes = "features"
    channel_dim: int | tuple[int, ...] = -1
    groups: int = 1
    partial: float = 1.0
    centered: bool = True
    statistic: Statistic = "mean_square"
    eps: float = 1e-5
    eps_at: EpsAt = "variance"
    has_weight: bool = True
    weight_offset: float = 0.0
    has_bias: bool = False
    weight_shape: WeightShape = "features"
    gain_dtype: GainDtype = "float32"
    rounding: Rounding = "after_gain"
    output_dtype: OutputDtype = "input"
    gate: Gate | None = None
    running: Running | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
        check_eps(self.eps)
        _check_channel_dim(self.axes, self.channel_dim)
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise ValueError(f"groups must be an integer >= 1; got {self.groups!r}")
        for name in ("partial", "weight_offset"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), float | int):
                raise TypeError(f"{name} must be a number; got {getattr(self, name)!r}")
        if not 0 < self.partial <= 1:
            raise ValueError(f"partial must be in (0, 1]; got {self.partial!r}")
        if not -math.inf < self.weight_offset < math.inf:
            raise ValueError(f"weight_offset must be finite; got {self.weight_offset!r}")
        self._check_gate()
        self._check_contradictions()

    def _check_gate(self) -> None:
        if self.gate is None:
            return
        ok = (
            isinstance(self.gate, tuple)
            and len(self.gate) == 2
            and self.gate[0] in get_args(GateFunction)
            and self.gate[1] in get_args(GatePosition)
        )
        if not ok:
            raise ValueError(f"gate must be None or ('silu' | 'sigmoid', 'before' | 'after'); got {self.gate!r}")

    def _check_contradictions(self) -> None:
        on_features = self.axes == "features"
        single_dim = isinstance(self.channel_dim, int)
        rules: list[tuple[bool, Callable[[], str]]] = [
            (
                self.groups > 1 and self.axes in ("batch", "instance"),
                lambda: f"groups={self.groups} has no meaning for axes={self.axes!r}; use axes='group' or 'features'",
            ),
            (
                self.groups > 1 and not single_dim,
                lambda: f"groups={self.groups} needs one channel_dim; got {self.channel_dim!r}",
            ),
            (
                self.partial < 1 and not (on_features and self.groups == 1 and single_dim),
                lambda: f"partial={self.partial} needs axes='features' over one dim with groups=1",
            ),
            (
                self.weight_shape == "per_head" and not (on_features and self.channel_dim == -1 and self.groups == 1),
                lambda: "weight_shape='per_head' needs axes='features', channel_dim=-1 and groups=1",
            ),
            (
                self.running is not None and self.axes not in ("batch", "instance"),
                lambda: f"running={self.running!r} needs axes='batch' or 'instance'; got {self.axes!r}",
            ),
            (self.frozen and self.axes != "batch", lambda: f"frozen=True needs axes='batch'; got {self.axes!r}"),
            (
                self.frozen and self.running is not None,
                lambda: f"frozen=True never updates its statistics, so running must be None; got {self.running!r}",
            ),
            (
                isinstance(self.running, float | int) and not 0 <= self.running <= 1,
                lambda: f"running must be a momentum in [0, 1]; got {self.running!r}",
            ),
            (
                isinstance(self.running, str) and self.running != "cumulative",
                lambda: f"running must be None, a momentum or 'cumulative'; got {self.running!r}",
            ),
        ]
        for broken, message in rules:
            if broken:
                raise ValueError(message())

    @property
    def kind(self) -> Kind:
        """``layer``, ``rms``, ``batch``, ``instance``, ``group``, ``l2`` or ``other``."""
        if self.axes != "features":
            return self.axes if self.centered and self.statistic != "sum" else "other"
        if self.centered:
            return "layer" if self.statistic != "sum" else "other"
        return {"mean_square": "rms", "sum": "l2", "unbiased": "other"}[self.statistic]  # type: ignore[return-value]

    def replace(self, **changes: object) -> NormSpec:
        """A copy with some fields changed (validated again)."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def canonical(self, *, channels: int | None = None, float32_only: bool = False) -> NormSpec:
        """The spec with everything removed that no input and no dtype could tell apart.

        Args:
            channels: the number of features or channels, where known: as many groups as channels are
                ``"instance"``, and a share of the features is what it selects.
            float32_only: the norm never sees half precision, so rounding and output dtype are void.

        Returns:
            A spec that computes the same for every input, up to the last bit of the compute dtype (with eps = 0 the
            root is multiplied by or divided by); equal for equal behaviour.
        """
        new: dict[str, object] = {}
        if self.axes == "group" and channels is not None and self.groups == channels:
            new |= {"axes": "instance", "groups": 1}
        if channels is not None and self.partial < 1:
            kept = partial_count(self.partial, channels)
            new["partial"] = 1.0 if kept == channels else kept / channels
        if self.eps == 0:  # only half precision throughout tells x * rsqrt(s) from x / sqrt(s)
            stored = self.frozen or self.running is not None  # multiplies by a reciprocal either way
            divides = self.eps_at != "variance" and self.rounding == "none" and not (float32_only or stored)
            new["eps_at"] = "std" if divides else "variance"
        if not self.has_weight:
            new |= {"weight_offset": 0.0, "weight_shape": "features", "gain_dtype": "float32"}
        elif self.weight_offset == 0:  # 0 + w is exact in every dtype
            new["gain_dtype"] = "float32"
        elif self.rounding == "none":  # there is no float32 to form it in
            new["gain_dtype"] = "input"
        if not self.has_weight and not self.has_bias:
            new["output_dtype"] = "input"
            if self.rounding == "before_gain" and (self.gate is None or self.gate[1] == "before"):
                new["rounding"] = "after_gain"
        if not self.has_weight and self.output_dtype == "weight":
            new["output_dtype"] = "input"
        per_channel = self.has_bias or (self.has_weight and self.weight_shape != "scalar")
        if self.axes == "group" and self.groups == 1 and not per_channel:
            new["channel_dim"] = 1  # all of a sample is one set: where its channels are makes no difference
        if self.frozen or self.running is not None:
            new["statistic"] = "mean_square"
        if self.frozen:
            new["centered"] = True  # by what is stored: a stored mean of zero is no other spec
        if float32_only:
            new |= {"rounding": "after_gain", "gain_dtype": "float32", "output_dtype": "input"}
        return self.replace(**new)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON-ready values, one key a field, plus ``kind``."""
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("gate", "channel_dim"):
            if isinstance(values[name], tuple):
                values[name] = list(values[name])  # type: ignore[call-overload]
        return {"kind": self.kind, **values}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> NormSpec:
        """The inverse of `to_dict`; unknown keys raise ValueError."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known - {"kind"})
        if unknown:
            raise ValueError(f"unknown NormSpec fields: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        given = {name: value for name, value in values.items() if name in known}
        for name in ("gate", "channel_dim"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])  # type: ignore[call-overload]
        return cls(**given)  # type: ignore[arg-type]


def check_eps(eps: float) -> None:
    """Refuse an eps that would give NaN silently (torch accepts a negative one)."""
    if isinstance(eps, bool) or not isinstance(eps, float | int):
        raise TypeError(f"eps must be a float >= 0; got {type(eps).__name__} {eps!r}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and >= 0; got {eps!r}")


def partial_count(partial: float, features: int) -> int:
    """How many leading features a share of them selects, rounded down as in the paper's code, and at least one."""
    return max(1, int(features * partial + 1e-9))


def _check_channel_dim(axes: str, channel_dim: object) -> None:
    if isinstance(channel_dim, tuple):
        n = len(channel_dim)
        if axes != "features" or n == 0 or channel_dim != tuple(range(-n, 0)):
            raise ValueError(
                "channel_dim as a tuple must name trailing dims in order, such as (-2, -1), with axes='features'; "
                f"got {channel_dim!r} with axes={axes!r}"
            )
    elif isinstance(channel_dim, bool) or channel_dim not in (-1, 1):
        raise ValueError(f"channel_dim must be -1, 1 or a tuple of trailing dims; got {channel_dim!r}")


# The named conventions. A family's own eps is a config value, so most users write LLAMA.replace(eps=...).

_RMS = NormSpec(centered=False, eps=1e-6)
_LAYER = NormSpec(has_bias=True)
_BATCH = NormSpec(axes="batch", channel_dim=1, has_bias=True, running=0.1)

TORCH_LAYER = _LAYER
TORCH_RMS = _RMS.replace(eps=1.1920928955078125e-07)
TORCH_BATCH = _BATCH
TORCH_INSTANCE = NormSpec(axes="instance", channel_dim=1, has_weight=False)
TORCH_GROUP = NormSpec(axes="group", channel_dim=1, groups=32, has_bias=True)
FROZEN_BATCH = _BATCH.replace(running=None, frozen=True, rounding="none", output_dtype="promoted")
CHANNEL_LAYER = _LAYER.replace(channel_dim=1, eps=1e-6)
LLAMA = _RMS.replace(rounding="before_gain", output_dtype="promoted")
GEMMA = _RMS.replace(weight_offset=1.0)
T5 = _RMS.replace(rounding="before_gain", output_dtype="weight")
OLMO = NormSpec(has_weight=False)
OLMO2 = _RMS.replace(eps=1e-5)
COHERE = NormSpec()
NEMOTRON = _LAYER.replace(weight_offset=1.0, gain_dtype="input")
MAMBA2_GATED = LLAMA.replace(eps=1e-5, gate=("silu", "before"))
QWEN3_NEXT_GATED = LLAMA.replace(gate=("silu", "after"), output_dtype="input")
RMS_NO_UPCAST = _RMS.replace(rounding="none", output_dtype="promoted")
ANNOTATED_LAYER = _LAYER.replace(statistic="unbiased", eps=1e-6, eps_at="std")
TEXTBOOK_LAYER = _LAYER.replace(eps=1e-6, eps_at="std")
L2_NORMALIZE = NormSpec(centered=False, statistic="sum", eps=1e-12, eps_at="floor", has_weight=False, rounding="none")
SCALE_NORM = L2_NORMALIZE.replace(eps=1e-5, has_weight=True, weight_shape="scalar")

NAMED: dict[str, NormSpec] = {
    "torch_layer": TORCH_LAYER,
    "torch_rms": TORCH_RMS,
    "torch_batch": TORCH_BATCH,
    "torch_instance": TORCH_INSTANCE,
    "torch_group": TORCH_GROUP,
    "frozen_batch": FROZEN_BATCH,
    "channel_layer": CHANNEL_LAYER,
    "llama": LLAMA,
    "gemma": GEMMA,
    "t5": T5,
    "olmo": OLMO,
    "olmo2": OLMO2,
    "cohere": COHERE,
    "nemotron": NEMOTRON,
    "mamba2_gated": MAMBA2_GATED,
    "qwen3_next_gated": QWEN3_NEXT_GATED,
    "rms_no_upcast": RMS_NO_UPCAST,
    "annotated_layer": ANNOTATED_LAYER,
    "textbook_layer": TEXTBOOK_LAYER,
    "l2_normalize": L2_NORMALIZE,
    "scale_norm": SCALE_NORM,
}
