"""A NormSpec in formulas."""

from __future__ import annotations

import torch

from normkit.spec import KIND_NAMES, NormSpec

_SETS = {
    "features": "the features of one position",
    "batch": "one channel, over the batch and all positions",
    "instance": "one channel of one sample, over its positions",
    "group": "one group of channels of one sample, over its positions",
}


def title(spec: NormSpec) -> str:
    """What it is, and what one statistic runs over."""
    shared = _SETS[spec.axes]
    if spec.axes == "features" and spec.groups > 1:
        shared = f"each of {spec.groups} equal parts of the features of one position"
    if spec.partial < 1:
        shared = f"the first {spec.partial:.3g} of the features of one position"
    name = KIND_NAMES[spec.kind] if spec.kind != "other" else "a normalization without a common name"
    return f"{name}: one statistic for {shared}"


def formula(spec: NormSpec) -> str:
    """The whole formula in one line."""
    gated = spec.gate is not None and spec.gate[1] == "before"
    x = f"x' = x * {spec.gate[0]}(gate);  " if gated and spec.gate is not None else ""
    inner = "x'" if gated else "x"
    top = f"({inner} - mean({inner}))" if spec.centered else inner
    return f"{x}y = {result(spec).replace('x̂', f'{top} / d', 1)},  d = {divisor(spec)}"


def numerator(spec: NormSpec) -> str:
    """What is divided."""
    return "(x - c)" if spec.centered else "x"


def statistic(spec: NormSpec, n: int) -> str:
    """How s is formed from n elements."""
    square = "(x - c)²" if spec.centered else "x²"
    return {
        "mean_square": f"mean of {n} {square}",
        "unbiased": f"sum of {n} {square}, / {n - 1}",
        "sum": f"sum of {n} {square}",
    }[spec.statistic]


def divisor(spec: NormSpec) -> str:
    """The divisor with its eps."""
    if spec.eps == 0:
        return "sqrt(s)"
    return {
        "variance": f"sqrt(s + {spec.eps:g})",
        "std": f"sqrt(s) + {spec.eps:g}",
        "floor": f"max(sqrt(s), {spec.eps:g})",
    }[spec.eps_at]


def result(spec: NormSpec) -> str:
    """Gain, bias and a gate that follows."""
    text = "x̂"
    if spec.has_weight:
        text += f" * ({spec.weight_offset:g} + w)" if spec.weight_offset else " * w"
    if spec.has_bias:
        text += " + b"
    if spec.gate is not None and spec.gate[1] == "after":
        text = f"({text})" if spec.has_bias else text
        text += f" * {spec.gate[0]}(gate)"
    return text


def rounding(spec: NormSpec, dtype: torch.dtype) -> str:
    """Where a half-precision result is rounded; empty where nothing is."""
    if dtype not in (torch.float16, torch.bfloat16):
        return ""
    return {
        "before_gain": "rounded before the gain, and the product once more",
        "after_gain": "rounded once, at the end",
        "none": "every step rounded: nothing left the input's dtype",
    }[spec.rounding]


def gradient(spec: NormSpec, *, stored: bool) -> str:
    """The input's gradient, with h = dy * gain."""
    h = (
        "h = dy"
        if not spec.has_weight
        else f"h = dy * ({spec.weight_offset:g} + w)"
        if spec.weight_offset
        else "h = dy * w"
    )
    if spec.gate is not None:
        h += f" * {spec.gate[0]}(gate)" if spec.gate[1] == "after" else ""
    if stored:
        return f"dx = h / d   ({h}; the statistics are constants)"
    n = {"mean_square": "mean(h x̂)", "unbiased": "sum(h x̂) / (n - 1)", "sum": "sum(h x̂)"}[spec.statistic]
    pulled = "h - mean(h)" if spec.centered else "h"
    q = "1 / d" if spec.eps_at == "variance" else "1 / sqrt(s)"
    text = f"dx = ({pulled} - x̂ {n}) / d" if spec.eps_at == "variance" else f"dx = ({pulled}) / d - {q} x̂ {n}"
    if spec.eps_at == "floor":
        text += ", its last term 0 where eps is the divisor"
    if spec.gate is not None and spec.gate[1] == "before":
        text += f", times {spec.gate[0]}(gate)"
    if spec.partial < 1:
        text += ", its last term only for the features inside the statistic"
    return f"{text}   ({h})"
