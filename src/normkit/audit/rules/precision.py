"""Precision: what the dtype that a statistic, a gain or a result is formed in does to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normkit.audit.reruns import HalfRange
from normkit.audit.result import Finding, NormRecord, names
from normkit.audit.rules.families import published
from normkit.audit.rules.registry import Evidence, MakeFinding, rule

_KEPT = 0.7
"""eps dominates where the divisor is more than its root of two: the statistic itself counts for less than half."""


def _in_float16(evidence: Evidence) -> Iterator[tuple[NormRecord, HalfRange]]:
    """Norms that form a statistic of a float16 input, with how they fare there against float32."""
    for norm in evidence.norms:
        stored = norm.spec is not None and (norm.spec.frozen or norm.spec.running is not None)
        if norm.input_dtype == "float16" and (norm.batch_statistics or not stored):
            found = evidence.reruns.half(norm.name, torch.float16)
            if found is not None:
                yield norm, found


@rule("statistic-overflow", "error", "the statistic is formed in float16, whose squares overflow from 256 on")
def statistic_overflow(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """float16 x = 300: the square is inf, and the norm returns 0 where the answer is about 1."""
    found = {n.name: r.overflows_from for n, r in _in_float16(evidence) if r.overflows_from is not None}
    if found:
        least = min(found.values())
        largest = max((v.largest for k, v in evidence.reruns.inputs.items() if k in found), default=0.0)
        seen = f"; in this run the largest was {largest:.3g}" if largest else ""
        yield finding(
            found,
            f"forms its statistic in float16: run alone with inputs of magnitude {least:g} it no longer gives what it "
            f"gives in float32, but zeros or NaN{seen}",
            "form the statistic in float32: x.float() before the square, or normkit.nn.RMSNorm / LayerNorm; "
            "or run in bfloat16",
        )


@rule("statistic-underflow", "error", "the statistic is formed in float16, where the squares of small values are 0")
def statistic_underflow(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """float16 x = 1e-4 and no eps: the square is 0, and the norm divides by it."""
    found = {
        n.name: r.underflows_below for n, r in _in_float16(evidence)
        if r.underflows_below is not None and not (r.zeros_give_nan and n.spec is not None and n.spec.eps > 0)
    }  # fmt: skip
    if found:
        yield finding(
            found,
            f"forms its statistic in float16: run alone with inputs of magnitude {max(found.values()):.3g} it no "
            "longer gives what it gives in float32, since their squares vanish",
            "form the statistic in float32: x.float() before the square; or run in bfloat16",
        )


@rule("eps-vanishes", "error", "eps is below the smallest number of the dtype that it is added in")
def eps_vanishes(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """1e-8 and 1e-12 are 0 in float16: a row of zeros divides by zero."""
    by_eps: dict[str, list[str]] = {}
    for norm, found in _in_float16(evidence):
        if found.zeros_give_nan:
            by_eps.setdefault("-" if norm.spec is None else f"{norm.spec.eps:.3g}", []).append(norm.name)
    for eps, where in by_eps.items():
        yield finding(
            where,
            f"adds eps = {eps} in float16, where it is 0: a row of zeros gives NaN (it does, run alone)",
            "form the statistic in float32, or take an eps of at least 1e-4 in float16",
        )


@rule("eps-dominates", "warning", "eps is larger than the mean square of what the norm receives")
def eps_dominates(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """The norm then scales by a constant instead of normalizing."""
    if not any(n.spec is not None and n.spec.eps for n in evidence.norms):
        return
    inputs = evidence.reruns.inputs
    found = {n.name: v for n in evidence.norms if (v := inputs.get(n.name)) is not None and _dominated(n, v.kept)}
    if found:
        squares = [v.mean_square for v in found.values() if v.mean_square is not None]
        least = min(v.kept for v in found.values() if v.kept is not None)
        yield finding(
            found,
            f"received a mean square of {min(squares):.2g} in this run, which its eps outweighs: its output has down "
            f"to {least:.0%} of the size that a norm gives",
            "take a smaller eps (in float32 1e-12 is safe), or scale what enters the norm; check that eps is the one "
            "that the weights were trained with",
        )


def _dominated(norm: NormRecord, kept: float | None) -> bool:
    stored = norm.spec is not None and norm.spec.running is not None and not norm.batch_statistics
    return kept is not None and kept < _KEPT and not stored


@rule("gain-in-half-precision", "warning", "offset and stored gain are added in half precision")
def gain_in_half_precision(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """1 + 15.8125 is 16.75 in bfloat16, and 16.8125 in float32."""
    norms = []
    for norm in evidence.norms:
        weight, spec = evidence.tensor(norm, "weight"), norm.spec
        if spec is None or weight is None or weight.dtype not in (torch.float16, torch.bfloat16):
            continue
        family = published(evidence.config, spec)
        usual = any(f.weight_offset != 0 and f.gain_dtype == "input" for f in family)
        if spec.weight_offset != 0 and spec.gain_dtype == "input" and not usual:
            norms.append(norm)
    if norms:
        dtype = str(next(evidence.tensor(n, "weight") for n in norms).dtype).removeprefix("torch.")  # type: ignore[union-attr]
        yield finding(
            names(norms),
            f"adds its offset to the stored gain in {dtype}: gains far from 0 lose their last bits (1 + 15.8125 "
            "becomes 16.75)",
            "form the gain in float32: weight.float() before the offset is added; keep it only where the weights' own "
            "code does so too (Nemotron)",
        )


@rule("cast-order", "warning", "half precision is rounded elsewhere than in the model family's published code")
def cast_order(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """float32, round, gain (Llama) against float32, gain, round (torch): a quarter of bfloat16 outputs differ."""
    groups: dict[tuple[str, str], list[str]] = {}
    for norm in evidence.norms:
        if norm.spec is None or norm.functional:
            continue
        family = published(evidence.config, norm.spec)
        orders = {f.rounding for f in family}
        if orders and norm.spec.rounding not in orders:
            said = " or ".join(sorted(_ORDERS[order] for order in orders))
            groups.setdefault((_ORDERS[norm.spec.rounding], said), []).append(norm.name)
    for (order, said), where in groups.items():
        yield finding(
            where,
            f"in half precision computes {order}, where {evidence.config.get('model_type')} models compute {said}: "
            "about a quarter of its bfloat16 outputs differ in the last bit",
            "take a norm with the family's order (normkit.nn.RMSNorm(rounding=...)), or expect outputs that are close "
            "and not equal",
        )


_ORDERS = {
    "before_gain": "float32, round, gain",
    "after_gain": "float32, gain, round",
    "none": "everything in the input's dtype",
}


@rule("mixed-dtypes", "info", "input and weight of a norm differ in dtype")
def mixed_dtypes(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """torch's fused norms take one dtype: others raise, or fall back to several operators."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for norm in evidence.norms:
        weight = evidence.tensor(norm, "weight")
        dtype = "" if weight is None else str(weight.dtype).removeprefix("torch.")
        if dtype and norm.input_dtype and dtype != norm.input_dtype:
            promotes = norm.spec is not None and norm.spec.output_dtype != "input"
            groups.setdefault((norm.input_dtype, dtype, promotes), []).append(norm.name)
    for (given, held, promotes), where in groups.items():
        result = f"; its output is {held if promotes else given}"
        yield finding(
            where,
            f"has a {held} weight and receives {given}: torch's fused norms take one dtype only, so it runs as several "
            f"operators or raises{result}",
            "cast the weight to the activations' dtype, or use normkit.nn's norms, which take any pair at full speed",
        )
