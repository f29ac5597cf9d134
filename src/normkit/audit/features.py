"""Which dims of a value hold the features that a norm ran over, through views, transposes and elementwise operators."""

from __future__ import annotations

from normkit.audit.find.operators import packet
from normkit.audit.trace.graph import Node, Trace

Dims = frozenset[int]
"""Dims that hold (part of) the features, counted from 0."""

_RESHAPES = frozenset(["view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten"])


def followed(trace: Trace, node: Node, value: int, dims: Dims) -> Dims | None:
    """Where the features of one of a node's inputs are in its (first) output; None where that is not known."""
    before, after = trace.values[value].shape, trace.values[node.outputs[0]].shape
    name, given = packet(node), node.args
    rank = len(before)
    if name in _RESHAPES:
        return _reshaped(before, after, dims)
    if name in ("transpose", "t"):
        first, second = (int(d) % rank for d in given[1:3]) if name == "transpose" else (0, rank - 1)
        swapped = {first: second, second: first}
        return frozenset(swapped.get(d, d) for d in dims)
    if name == "permute":
        order = [int(d) % rank for d in given[1]]
        return frozenset(order.index(d) for d in dims)
    if name == "unsqueeze":
        at = int(given[1]) % (rank + 1)
        return frozenset(d + (d >= at) for d in dims)
    if name in ("squeeze", "select") and len(given) > 1 and isinstance(given[1], int):
        at = given[1] % rank
        gone = len(after) < rank
        return frozenset(d - (gone and d > at) for d in dims if not (gone and d == at))
    if len(after) >= rank and all(b in (1, a) for b, a in zip(before[::-1], after[::-1], strict=False)):
        return frozenset(d + len(after) - rank for d in dims)  # elementwise, or expanded
    return dims if len(after) == rank else None


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], dims: Dims) -> Dims | None:
    """The same in a view: runs of dims on both sides with the same number of elements."""
    found: set[int] = set()
    i = j = 0
    while i < len(before) or j < len(after):
        start, begin, left, right = i, j, 1, 1
        while True:
            if left <= right and i < len(before):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                return None
            if left == right and (i > start and j > begin):
                break
            if left == right and left == 1 and i == len(before) and j == len(after):
                break
        if any(start <= d < i for d in dims):
            found.update(range(begin, j))
    return frozenset(found)
