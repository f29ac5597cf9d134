"""A NormSpec and a placement in words, the same in every report."""

from __future__ import annotations

from pathlib import Path

from normkit.audit.result import NormRecord
from normkit.spec import KIND_NAMES, NormSpec


def kind(norm: NormRecord) -> str:
    """The kind in one word."""
    return KIND_NAMES[norm.kind]


def what(norm: NormRecord) -> str:
    """What it computes, in a few words."""
    spec = norm.spec
    if spec is None:
        return norm.reason
    words = [kind(norm)]
    if spec.partial < 1:
        words.append(f"over the first {spec.partial:.3g} of the features")
    if spec.statistic == "unbiased":
        words.append("(unbiased)")
    if spec.gate is not None:
        words.append(f"{spec.gate[0]} gate {spec.gate[1]}")
    if spec.frozen:
        words.append("frozen")
    if norm.batch_statistics and spec.running is not None:
        words.append("on batch statistics")
    return " ".join(words)


def axes(norm: NormRecord) -> str:
    """Which elements share a statistic, with their number."""
    spec, shape = norm.spec, norm.input_shape
    if spec is None or not shape:
        return "-"
    if isinstance(spec.channel_dim, tuple):
        sizes = "×".join(str(n) for n in shape[-len(spec.channel_dim) :])
        return f"{sizes} features"
    size = shape[spec.channel_dim] if -len(shape) <= spec.channel_dim < len(shape) else 0
    channels = f"{size} channel{'' if size == 1 else 's'}"
    if spec.axes == "batch":
        return f"batch, {channels}"
    if spec.axes == "instance":
        return f"sample, {channels}"
    if spec.axes == "group":
        return f"sample, {spec.groups} groups of {size // spec.groups}"
    if spec.groups > 1:
        return f"{spec.groups} groups of {size // spec.groups}"
    of_each = " of each head" if norm.placement == "qk" and len(shape) > 3 else ""
    return f"{size}{' (dim 1)' if spec.channel_dim == 1 else ''}{of_each}"


def eps(spec: NormSpec | None) -> str:
    """eps, and where it enters if not in the variance."""
    if spec is None:
        return "-"
    place = {"variance": "", "std": " on std", "floor": " floor"}[spec.eps_at]
    return f"{spec.eps:.3g}{place}" if spec.eps else "none"


def gain(spec: NormSpec | None) -> str:
    """The gain convention."""
    if spec is None:
        return "-"
    if not spec.has_weight:
        text = "none"
    else:
        text = "w" if spec.weight_offset == 0 else f"{spec.weight_offset:g}+w"
        text += {"features": "", "per_head": " per head", "scalar": " (one number)"}[spec.weight_shape]
        if spec.gain_dtype == "input" and spec.weight_offset != 0 and spec.rounding != "none":
            text += " in the weight's dtype"
    return text + (", bias" if spec.has_bias else "")


def precision(spec: NormSpec | None) -> str:
    """Where half precision is rounded."""
    if spec is None:
        return "-"
    return {
        "before_gain": "f32, round, gain",
        "after_gain": "f32, gain, round",
        "none": "input dtype",
    }[spec.rounding]


_BITS = 1e-3
"""Kernels that sum in another order give about 1e-4 of half-precision outputs otherwise; from here on it is said."""


def mismatch(norm: NormRecord) -> str:
    """How many half-precision outputs are not as the reported order of rounding gives them; mostly nothing."""
    share = norm.half_mismatch
    return "" if share is None or share < _BITS else f" (but {100 * share:.2g} % of outputs)"


def location(norm: NormRecord) -> str:
    """``file.py:line`` of the model that runs it, without the folder."""
    return "" if norm.location is None else f"{Path(norm.location[0]).name}:{norm.location[1]}"
