"""A residual stream as the sequence of what happens on it, repeated layers folded: what a report draws."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from normkit.audit.report.grouping import Run, runs
from normkit.audit.result import Audit, BranchRecord, NormRecord, collapse

_BEFORE = ("embedding", "conv")


@dataclass(frozen=True)
class Step:
    """A residual branch, or a norm on the stream itself."""

    branch: BranchRecord | None
    norm: NormRecord | None = None
    """The norm on the stream; for a branch, see ``slots``."""
    slots: tuple[tuple[str, NormRecord], ...] = ()
    """The branch's norms by slot (input, inside, inner, output), in this order."""


@dataclass(frozen=True)
class Stream:
    """One stream from its start to its end."""

    number: int
    runs: tuple[Run[Step], ...]


def streams(audit: Audit) -> tuple[list[Stream], list[NormRecord]]:
    """Every stream, and the norms that lie on none and in no branch of one."""
    norms = {n.name: n for n in audit.norms}
    numbers = list(dict.fromkeys(b.stream for b in audit.branches))
    used: set[str] = set()
    found = []
    for number in numbers:
        branches = [b for b in audit.branches if b.stream == number]
        held = {name for b in branches for names in (*b.slots.values(), b.inside) for name in names}
        loose = [n for n in audit.norms if n.stream == number and n.name not in held and n.name not in used]
        first = [n for n in loose if n.placement in _BEFORE or n.placement == "pre"]
        steps = [Step(None, n) for n in first]
        for branch in branches:
            steps += _steps(branch, norms)
        steps += [Step(None, n) for n in loose if n not in first]
        used |= held | {n.name for n in loose}
        found.append(Stream(number, tuple(runs(steps, [_key(s) for s in steps]))))
    return found, [n for n in audit.norms if n.name not in used]


def _steps(branch: BranchRecord, norms: dict[str, NormRecord]) -> list[Step]:
    inside = tuple(("inside", norms[n]) for n in branch.inside if n in norms)
    slots = {slot: tuple((slot, norms[n]) for n in names if n in norms) for slot, names in branch.slots.items()}
    ordered = (*slots.get("input", ()), *inside, *slots.get("inner", ()), *slots.get("output", ()))
    return [Step(branch, None, ordered), *(Step(None, norm) for _, norm in slots.get("stream", ()))]


def _key(step: Step) -> Hashable:
    slots = tuple((slot, *_norm_key(norm)) for slot, norm in step.slots)
    branch = step.branch
    if branch is None:
        return _norm_key(step.norm) if step.norm is not None else ()
    return collapse(branch.name), branch.placement, branch.alpha, branch.branch_scale, slots


def _norm_key(norm: NormRecord) -> tuple[Hashable, ...]:
    return collapse(norm.name), norm.spec, norm.kind, norm.placement, norm.input_shape[-1:]
