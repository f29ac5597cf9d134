"""Which norm of one model stands for which of another: by order of execution and place, whatever their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from normkit.audit.result import NormRecord

_GAP = 3.0
"""What leaving one norm unmatched costs; two of them cost more than any pair that is like enough."""


def match(a: Sequence[NormRecord], b: Sequence[NormRecord]) -> list[tuple[NormRecord | None, NormRecord | None]]:
    """The cheapest alignment of two sequences of norms; both stay in order."""
    rows, columns = len(a), len(b)
    cost = [[0.0] * (columns + 1) for _ in range(rows + 1)]
    for i in range(1, rows + 1):
        cost[i][0] = i * _GAP
    for j in range(1, columns + 1):
        cost[0][j] = j * _GAP
    keys_a, keys_b = [_key(n) for n in a], [_key(n) for n in b]
    known: dict[tuple[object, object], float] = {}
    for i in range(1, rows + 1):
        above, here = cost[i - 1], cost[i]
        for j in range(1, columns + 1):
            pair = (keys_a[i - 1], keys_b[j - 1])
            unlike = known.get(pair)
            if unlike is None:
                unlike = known[pair] = _unlike(a[i - 1], b[j - 1])
            same_name = 0.0 if a[i - 1].name == b[j - 1].name else 0.05
            here[j] = min(above[j - 1] + unlike + same_name, above[j] + _GAP, here[j - 1] + _GAP)
    return _path(a, b, cost, known, keys_a, keys_b)


def _path(
    a: Sequence[NormRecord],
    b: Sequence[NormRecord],
    cost: list[list[float]],
    known: dict[tuple[object, object], float],
    keys_a: list[object],
    keys_b: list[object],
) -> list[tuple[NormRecord | None, NormRecord | None]]:
    i, j = len(a), len(b)
    found: list[tuple[NormRecord | None, NormRecord | None]] = []
    while i or j:
        if i and j:
            same_name = 0.0 if a[i - 1].name == b[j - 1].name else 0.05
            unlike = known[keys_a[i - 1], keys_b[j - 1]] + same_name
            if abs(cost[i][j] - cost[i - 1][j - 1] - unlike) < 1e-9:
                i, j = i - 1, j - 1
                found.append((a[i], b[j]))
                continue
        if i and abs(cost[i][j] - cost[i - 1][j] - _GAP) < 1e-9:
            i -= 1
            found.append((a[i], None))
        else:
            j -= 1
            found.append((None, b[j]))
    return found[::-1]


def _key(norm: NormRecord) -> object:
    return norm.placement, norm.kind, norm.input_shape, norm.calls, norm.functional, _last(norm.name)


def _last(name: str) -> str:
    return re.sub(r"[#\d]+", "", name.rsplit(".", 1)[-1])


def _unlike(a: NormRecord, b: NormRecord) -> float:
    """How little two norms look like one at one place; a name counts least."""
    total = 0.0
    total += 2.5 * (a.placement != b.placement)
    total += 1.0 * (a.kind != b.kind)
    total += 2.0 * (a.input_shape[-1:] != b.input_shape[-1:])
    total += 0.5 * (a.calls != b.calls)
    return total + 0.2 * (_last(a.name) != _last(b.name))
