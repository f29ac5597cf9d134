"""Convention: stored gains, eps, biases and values against what the weights and the family were made for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from normkit.audit.result import Finding, NormRecord, collapse, names
from normkit.audit.rules.families import published
from normkit.audit.rules.registry import Evidence, MakeFinding, rule

_IMPLAUSIBLE = 1e6
_DENORMAL = 1e-30


@rule("gain-offset", "error", "the stored gains look like 1 + w read as w, or the reverse")
def gain_offset(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Same keys, shapes and dtypes: only the values tell a gain from a gain less one.

    No published model stores the gains of batch statistics less one, and trained ones of both signs are common. Nor is
    a norm that ends a branch suspect by itself: many start it at 0, so that the branch starts as the identity.
    """
    ends = {name for branch in evidence.branches for name in branch.slots.get("output", ())}
    groups: dict[tuple[str, float], list[NormRecord]] = {}
    for norm in evidence.norms:
        spec = norm.spec
        if spec is not None and spec.has_weight and spec.weight_offset in (0.0, 1.0) and spec.axes != "batch":
            groups.setdefault((collapse(norm.name), spec.weight_offset), []).append(norm)
    suspects: dict[float, list[str]] = {}
    for (_, offset), norms in groups.items():
        assert norms[0].spec is not None
        gains = [w.float().flatten() for n in norms if (w := evidence.values(n, "weight")) is not None]
        starts = {row.starts_at for row in published(evidence.config, norms[0].spec) if row.weight_offset == offset}
        if gains and offset == 1 and 1.0 in starts:
            continue  # the family's own initialization puts them there (Nemotron)
        if gains and _contradicts(torch.cat(gains), offset):
            suspects.setdefault(offset, []).extend(names(norms))
    for offset, where in suspects.items():
        if offset == 0 and ends.issuperset(where):
            continue
        if offset == 0:
            message = "multiplies by the stored gain, whose values lie around 0 with both signs, as gains stored less "
            message += "one do: the features come out near zero, half of them with their sign changed"
            fix = "add 1 to the stored gain when it is used (weight_offset=1.0), or to the checkpoint when it is loaded"
        else:
            message = "multiplies by 1 + the stored gain, whose values lie close around 1, as plain gains do: "
            message += "the features come out about twice as large"
            fix = "multiply by the stored gain itself (weight_offset=0.0), or subtract 1 from it on loading"
        yield finding(where, message, fix)


def _contradicts(gain: Tensor, offset: float) -> bool:
    """Whether gains were stored under the other convention, by their distribution.

    Trained plain gains keep their sign (they start at 1), however small some layers' become; stored less one they
    have both signs around 0. Constant gains are as initialized, and say nothing.
    """
    if gain.numel() < 16 or not bool(torch.isfinite(gain).all()) or float(gain.std()) < 1e-4:
        return False
    negative = float((gain < 0).float().mean())
    middle = float(gain.median())
    if offset == 0:
        return negative > 0.2 and abs(middle) < 0.3
    return negative < 0.02 and 0.7 < middle < 1.3 and float((gain - middle).abs().median()) < 0.3


@rule("eps-mismatch", "warning", "a norm's eps is none of those in the config")
def eps_mismatch(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """eps not passed on, hard-coded or misnamed: 1e-5 for 1e-6 at a mean square of 4e-4 is 1.1 % off."""
    stated = dict(_eps_entries(evidence.config))
    if not stated:
        return
    groups: dict[float, list[str]] = {}
    for norm in evidence.norms:
        spec = norm.spec
        if spec is None or norm.kind not in ("layer", "rms") or norm.placement not in _ON_STREAM or norm.functional:
            continue
        if all(abs(spec.eps - value) > 0.02 * max(value, spec.eps) for value in stated.values()):
            groups.setdefault(spec.eps, []).append(norm.name)
    said = ", ".join(f"{name} = {value:.4g}" for name, value in stated.items())
    for eps, where in groups.items():
        yield finding(
            where,
            f"computes with eps = {eps:.4g}; the config says {said}",
            "pass the config's eps to the norm, under the name that its constructor takes; keep it only where the "
            "published code has a constant there",
        )


_ON_STREAM = ("pre", "post", "output", "final", "embedding", "head")


def _eps_entries(config: Mapping[str, Any], lead: str = "") -> Iterator[tuple[str, float]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _eps_entries(value, f"{lead}{name}.")
        elif isinstance(value, float) and re.search(r"eps(ilon)?(_|$)", name) and 0 < value < 0.1:
            yield f"{lead}{name}", value


@rule("nonfinite-weights", "error", "a norm's weight or bias holds NaN or infinity")
def nonfinite_weights(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """One NaN in a gain is a NaN in every token."""
    norms = [n for n in evidence.norms if any(not bool(torch.isfinite(t).all()) for t in _gain_and_bias(evidence, n))]
    if norms:
        yield finding(
            names(norms),
            "holds NaN or infinite values in its weight or bias: every output of those channels is lost",
            "load the checkpoint again; a run that diverged saved this, or memory that was never initialized",
        )


def _gain_and_bias(evidence: Evidence, norm: NormRecord) -> list[Tensor]:
    return [t for role in ("weight", "bias") if (t := evidence.values(norm, role)) is not None]


@rule("uninitialised-weights", "error", "a norm's weights were not in the checkpoint, or hold what memory held")
def uninitialised_weights(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Renamed keys leave norms at their initial values, in silence; torch.empty leaves them at anything."""
    missing = _left_out(evidence)
    if missing:
        yield finding(
            missing,
            "was not filled from the checkpoint (its keys are missing, or of another shape): it still has its initial "
            "values",
            "map the checkpoint's keys to the model's names, or take the class that the checkpoint was saved from",
        )
    odd = [n for n in evidence.norms if any(_implausible(t) for t in _gain_and_bias(evidence, n))]
    if odd:
        yield finding(
            names(odd),
            "holds values that no training gives (beyond 1e6, or most of them below 1e-30 and not 0): memory that was "
            "never initialized",
            "initialize the norm (reset_parameters) after to_empty(), or load the checkpoint's values",
        )


def _left_out(evidence: Evidence) -> list[str]:
    report = evidence.loading
    if report is None:
        return []
    keys = {*report.missing, *report.mismatched}
    own = {name: id(t) for name, t in (*evidence.model.named_parameters(remove_duplicate=False),
                                       *evidence.model.named_buffers(remove_duplicate=False))}  # fmt: skip
    lost = {own[key] for key in keys if key in own}
    roles = ("weight", "bias", "running_mean", "running_var")
    return [n.name for n in evidence.norms if any(id(evidence.tensor(n, role)) in lost for role in roles)]


def _implausible(tensor: Tensor) -> bool:
    size = tensor.float().abs()
    size = size[torch.isfinite(size)]
    faint = (size > 0) & (size < _DENORMAL)  # decay wears single gains down so far (MiniLM's 1e-33), never most
    return bool((size > _IMPLAUSIBLE).any()) or 2 * int(faint.sum()) > tensor.numel()


@rule("zero-gain", "warning", "a norm's gain is zero in every channel, so that nothing passes it")
def zero_gain(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Right as an initialization of a branch's last norm; elsewhere a gain that was lost, or decayed away."""
    found = []
    last = {name for b in evidence.branches for name in b.slots.get("output", ())}
    for norm in evidence.norms:
        weight = evidence.values(norm, "weight")
        if weight is None or norm.spec is None or norm.name in last or norm.placement == "output":
            continue
        if bool((weight.float() + norm.spec.weight_offset == 0).all()):
            found.append(norm)
    if found:
        yield finding(
            names(found),
            "has an effective gain of exactly 0 in every channel: its output is its bias alone",
            "load the gain from the checkpoint, or start it at 1 (0 for a gain stored less one)",
        )


@rule("unexpected-bias", "warning", "a norm has a bias where the model family's has none")
def unexpected_bias(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """A bias that no checkpoint of the family fills stays at its initial value, or was trained by someone."""
    norms = []
    for norm in evidence.norms:
        if norm.spec is not None and norm.spec.has_bias and not norm.functional:
            family = published(evidence.config, norm.spec)
            if family and not any(row.has_bias for row in family):
                norms.append(norm)
    if norms:
        yield finding(
            names(norms),
            f"adds a bias; the norms of {evidence.config.get('model_type')} models have none",
            "build the norm without a bias (bias=False), unless these weights were trained with one",
        )
