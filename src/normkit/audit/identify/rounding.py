"""Where half precision is rounded: decided by bits, against every order that NormSpec can say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normkit.audit.identify.probe import NotANorm, Probe
from normkit.reference import align, form_gain, output_dtype, reduced_dims
from normkit.spec import NormSpec, partial_count

if TYPE_CHECKING:
    from normkit.audit.identify.verify import Binding

_COMBINATIONS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float16),
)
"""(input, parameters): what a cast model, a model with float32 norms, a float32 stream and a float16 model see."""


_ENOUGH = 64


@dataclass(frozen=True)
class Precision:
    """The best order, and the share of half-precision outputs that it does not give bit for bit."""

    spec: NormSpec
    mismatch: float | None
    note: str = ""


def precision(probe: Probe, spec: NormSpec, binding: Binding, shape: tuple[int, ...], channels: int) -> Precision:
    """Choose rounding, gain dtype and output dtype by the number of bits that differ."""
    candidates = _candidates(spec, channels)
    wide = _wide(probe, shape)
    wrong = dict.fromkeys(candidates, 0)
    dtypes: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {}
    total = 0
    spelled: dict[int, int] = {}
    for round_ in range(1 if channels >= _ENOUGH else 3):
        if round_:  # few channels: other parameter values, so that no candidate is right by chance
            binding.redraw()
        for x_dtype, p_dtype in _COMBINATIONS:
            if p_dtype != x_dtype and not binding.uses:
                continue
            x = (probe.random(wide) * 2).to(x_dtype)
            second = None if probe.second is None else (probe.random(wide) * 2).to(x_dtype)
            with probe.parameters_in(p_dtype):
                try:
                    y = probe(x, second)
                except NotANorm:
                    continue
            dtypes[x_dtype, p_dtype] = y.dtype
            total += y.numel()
            if x_dtype == p_dtype:
                for i, expected in enumerate(_without_float32(x, spec, binding.tensors(spec, p_dtype))):
                    spelled[i] = spelled.get(i, 0) + _different(expected, y)
            for candidate in candidates:
                wrong[candidate] += _different(binding.predict(x, candidate, second, p_dtype).to(y.dtype), y)
    if not dtypes:
        return Precision(spec.canonical(channels=channels, float32_only=True), None, "it runs in float32 only")
    right_dtype = [
        s for s in candidates if all(output_dtype(x, s, *binding.dummies(p)) == y for (x, p), y in dtypes.items())
    ]
    note = ""
    if not right_dtype:
        seen = ", ".join(f"{x} with {p} parameters gives {y}" for (x, p), y in dtypes.items())
        note = "its output dtype follows no rule that a NormSpec says (" + seen.replace("torch.", "") + ")"
        right_dtype = [s for s in candidates if s.output_dtype == "input"]
    scores = [(wrong[s] / total, s) for s in right_dtype]
    least = min(mismatch for mismatch, _ in scores)
    if least > 0.02 and spelled and min(spelled.values()) / total < least / 2:
        scores = [(mismatch, s) for mismatch, s in scores if s.rounding == "none"] or scores
        least = min(mismatch for mismatch, _ in scores)
    clear = max(2 * least, 1e-3)  # candidates this close are equally good: the likelier one is reported
    mismatch, best = next(pair for pair in scores if pair[0] <= clear)
    if mismatch > 0.02 and not note:
        note = f"in half precision {mismatch:.0%} of its outputs differ from the nearest order that a NormSpec says"
    return Precision(best, mismatch, note)


def _without_float32(x: Tensor, spec: NormSpec, given: dict[str, Tensor]) -> Iterator[Tensor]:
    """Common spellings of a norm in the input's own dtype.

    The reference has one; code that divides by a root, or takes torch's norm or std (which round once), has other bits
    and still leaves no step in float32.
    """
    if spec.groups > 1 or spec.axes == "group" or spec.gate is not None or "running_var" in given:
        return
    dims = reduced_dims(spec, x.dim())
    inside = x.narrow(dims[0], 0, partial_count(spec.partial, x.shape[dims[0]])) if spec.partial < 1 else x
    mean = inside.mean(dims, keepdim=True) if spec.centered else torch.zeros((), dtype=x.dtype)
    d, n = x - mean, math.prod(inside.shape[i] for i in dims)
    rest = inside - mean
    divisor = {"mean_square": n, "unbiased": n - 1, "sum": 1}[spec.statistic]
    gain, shift = form_gain(given.get("weight"), spec, x.dim()), given.get("bias")
    shift = None if shift is None else align(shift, spec, x.dim())
    once = torch.linalg.vector_norm(inside, dim=dims, keepdim=True)
    if spec.centered:
        once = inside.std(dims, keepdim=True, correction=1 if spec.statistic == "unbiased" else 0)
    else:
        once = once if divisor == 1 else once * divisor**-0.5
    for root in ((rest.pow(2).sum(dims, keepdim=True) / divisor).sqrt(), once):
        square = rest.pow(2).mean(dims, keepdim=True) if divisor == n else root.square()
        den = {
            "variance": (square + spec.eps).sqrt(),
            "std": root + spec.eps,
            "floor": root.clamp_min(spec.eps),
        }[spec.eps_at]
        if spec.statistic == "mean_square" and not spec.centered and spec.eps_at == "floor":  # normalize, times sqrt(n)
            length = torch.linalg.vector_norm(inside, dim=dims, keepdim=True).clamp_min(spec.eps * n**0.5)
            for y in (d / length * n**0.5, d * (n**0.5 / length)):
                yield y * (1.0 if gain is None else gain) + (0.0 if shift is None else shift)
        for y in (d / den, d * (1 / den)) if gain is None else (gain * (d / den), gain * d / den, d * (gain / den)):
            yield y if shift is None else y + shift


def _different(expected: Tensor, y: Tensor) -> int:
    """How many outputs differ: by bits, or (float32 outputs) by more than the order of a sum explains."""
    if y.dtype == torch.float32:
        return int(((expected - y).abs() > 2e-5 * y.abs().mean()).sum())
    return int((expected != y).sum())


def _candidates(spec: NormSpec, channels: int) -> list[NormSpec]:
    """Every order that half precision can tell apart, likelier ones first (ties go to the first)."""
    options = itertools.product(
        ("after_gain", "before_gain", "none"), ("input", "promoted", "weight"), ("float32", "input")
    )
    divides = ("variance", "std") if spec.eps == 0 else (spec.eps_at,)  # times rsqrt, or divided by the root
    orders = (
        spec.replace(rounding=rounding, output_dtype=output, gain_dtype=gain, eps_at=at).canonical(channels=channels)
        for (rounding, output, gain), at in itertools.product(options, divides)
    )
    return list(dict.fromkeys(orders))


def _wide(probe: Probe, shape: tuple[int, ...]) -> tuple[int, ...]:
    """More rows where there are few outputs, so that rare last bits do not decide."""
    numel = 1
    for n in shape:
        numel *= n
    if numel >= 2048 or len(shape) < 2:
        return shape
    larger = (shape[0] * (2048 // max(numel, 1) + 1), *shape[1:])
    return larger if probe.second is None and probe.accepts(larger) else shape
