"""Repeated layers: names without their numbers, norms that differ in nothing else, runs of a stream that repeat."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from normkit.audit.result import NormRecord, collapse

T = TypeVar("T")
_LONGEST_PERIOD = 24


def group(norms: Sequence[NormRecord]) -> list[list[NormRecord]]:
    """Norms that differ in nothing but a layer's number, in order of first appearance."""
    groups: dict[tuple[object, ...], list[NormRecord]] = {}
    for norm in norms:
        key = (
            collapse(norm.name),
            norm.spec,
            norm.kind,
            norm.placement,
            norm.calls,
            norm.input_shape[-1:],
            norm.reason if norm.spec is None else "",
        )
        groups.setdefault(key, []).append(norm)
    return list(groups.values())


@dataclass(frozen=True)
class Run(Generic[T]):
    """Some items that come ``times`` over, one after another; ``items`` are those of the first time."""

    items: tuple[T, ...]
    times: int


def runs(items: Sequence[T], keys: Sequence[Hashable]) -> list[Run[T]]:
    """Cut a sequence into runs: at each place the period that covers most, the shortest of equals.

    Args:
        items: the sequence.
        keys: one for each item; equal keys make equal items.
    """
    found: list[Run[T]] = []
    start = 0
    while start < len(items):
        best, covered = 1, 1
        for period in range(1, min(_LONGEST_PERIOD, (len(items) - start) // 2) + 1):
            pattern = keys[start : start + period]
            times = 1
            while keys[start + times * period : start + (times + 1) * period] == pattern:
                times += 1
            if times > 1 and times * period > covered:
                best, covered = period, times * period
        found.append(Run(tuple(items[start : start + best]), covered // best))
        start += covered
    return found
