"""One residual branch in the terms of the placement equation.

y = N_stream( alpha * x  +  lambda * N_output( F( g * N_input(x) ) ) )          F may hold N_inner
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from normkit.audit.place.flow import Add, Flow
from normkit.audit.place.roles import Role
from normkit.audit.place.streams import Streams
from normkit.audit.trace.graph import Ref


@dataclass(frozen=True, slots=True)
class Branch:
    """A residual branch.

    Args:
        name: the longest common module path of what the branch computes.
        placement: the wiring: ``pre``, ``post``, ``sandwich``, ``output``, ``deepnorm``, ``sub``, ``normformer``,
            ``scaled``, ``parallel``, ``layerscale``, ``rezero`` (SkipInit is the same wiring), ``fixup`` or ``none``.
        node: index of the add in the trace; branches are in this order.
        stream: which stream: 0 for the first that the run meets.
        source: the vertex that the branch reads (two branches with one source are parallel).
        n_input, n_inner, n_output, n_stream: ids of the norms in each slot.
        alpha: constant factor on the identity path.
        scale: constant factor on the branch output (lambda); 1.0 where there is none.
        learned_scale: ``"vector"`` (layer scale) or ``"scalar"`` (ReZero) where a parameter scales the branch.
        gain: constant factor on the normalized input (g).
        identity, addend: the values that are added: the stream's and the branch's.
        inside: ids of the other norms that the branch holds (of queries and keys, in the middle).
    """

    name: str
    placement: str
    node: int
    stream: int
    source: int
    n_input: tuple[str, ...] = ()
    n_inner: tuple[str, ...] = ()
    n_output: tuple[str, ...] = ()
    n_stream: tuple[str, ...] = ()
    alpha: float = 1.0
    scale: float = 1.0
    learned_scale: str | None = None
    gain: float = 1.0
    identity: int = -1
    addend: int = -1
    inside: tuple[str, ...] = ()


def describe(flow: Flow, streams: Streams, seats: Mapping[int, str], names: Mapping[int, str]) -> list[Branch]:
    """Every branch of every stream, in the order in which they were added.

    Args:
        flow, streams: the analysed trace.
        seats: placement by dataflow of each norm vertex.
        names: id of each norm vertex.
    """
    behind: dict[int, list[int]] = {}
    for vertex, seat in seats.items():
        data = flow.data[vertex]
        if seat == "post" and data is not None:
            behind.setdefault(flow.root[data], []).append(vertex)
    numbers: dict[int, int] = {}
    found = []
    for node, add in streams.adds.items():
        number = numbers.setdefault(streams.origin[node], len(numbers))
        found.append(_branch(flow, streams, add, number, seats, names, behind.get(node, [])))
    return _norm_formers(flow, found)


def _norm_formers(flow: Flow, branches: list[Branch]) -> list[Branch]:
    """NormFormer by its two kinds of branch: attention is normed at both ends, all else at its input and inside.

    Each alone is a sandwich or a Sub-LN; only where a stream's branches differ so are they NormFormer's.
    """
    streams_of: dict[int, list[Branch]] = {}
    for branch in branches:
        streams_of.setdefault(branch.stream, []).append(branch)
    formers: set[int] = set()
    for stream, group in streams_of.items():
        if {b.placement for b in group} == {"sandwich", "sub"}:
            ends = [_attends(flow, b.addend, b.source) == (b.placement == "sandwich") for b in group]
            formers.update([stream] if all(ends) else [])
    return [replace(b, placement="normformer") if b.stream in formers else b for b in branches]


def _branch(
    flow: Flow,
    streams: Streams,
    add: Add,
    stream: int,
    seats: Mapping[int, str],
    names: Mapping[int, str],
    behind: list[int],
) -> Branch:
    nested = {v for node in add.interior if node in streams.adds for v in streams.adds[node].interior}
    inside = [v for v in sorted(add.interior - nested) if v in seats]
    if add.projected and add.source in seats:
        inside.insert(0, add.source)  # the shortcut reads what the norm gives too

    def ids(seat: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names[v] for v in inside if seats[v] == seat))

    last = _last_norms(flow, add)
    inner = tuple(dict.fromkeys(names[v] for v in inside if seats[v] == "inner" and v in last))
    alpha, _ = _factors(flow, add.identity, add.interior)  # what both paths share (an embedding scale) is no alpha
    scale, learned = _factors(flow, add.branch)
    gains = [_gain(flow, v) for v in inside if seats[v] == "pre"]
    gain = gains[0] if gains else 1.0
    n_input, n_output = ids("pre"), ids("output")
    n_stream = tuple(dict.fromkeys(names[v] for v in behind))
    slotted = {*n_input, *inner, *n_output}
    others = tuple(n for n in dict.fromkeys(names[v] for v in inside) if n not in slotted)
    placement = _wiring(bool(n_input), bool(inner), bool(n_output), bool(n_stream), alpha, learned, gain)
    if placement == "rezero" and _is_shifted(flow, add.branch):
        placement = "fixup"
    if placement == "pre" and _is_parallel(flow, streams, add):
        placement = "parallel"
    return Branch(
        _name(flow, add), placement, add.node, stream, add.source,
        n_input, inner, n_output, n_stream, alpha, scale, learned, gain, add.identity, add.branch,
        others,
    )  # fmt: skip


def _wiring(
    has_input: bool, has_inner: bool, has_output: bool, has_stream: bool, alpha: float, learned: str | None, gain: float
) -> str:
    if has_stream and not has_input:
        return "deepnorm" if alpha > 1 else "post"
    if has_input and has_inner:
        return "normformer" if has_output else "sub"
    if has_input and has_output:
        return "sandwich"
    if has_output:
        return "output"
    if has_input:
        return "scaled" if gain != 1 else "layerscale" if learned == "vector" else "pre"
    return {"vector": "layerscale", "scalar": "rezero"}.get(learned or "", "none")


def _is_parallel(flow: Flow, streams: Streams, add: Add) -> bool:
    """Whether two sublayers read one point of the stream, be they added one by one or summed first."""
    before = streams.adds.get(add.link) if add.link is not None else None
    after = next((a for a in streams.adds.values() if a.link == add.node), None)
    if any(other is not None and other.source == add.source for other in (before, after)):
        return True
    total = flow.root[add.branch]
    if total < 0 or flow.roles[total] is not Role.ADD or len(flow.actives(total)) != 2:
        return False
    # a sum of experts has two parts as well; only of a parallel block one attends (or scans), and one does not
    return len({_attends(flow, value, add.source) for value in flow.actives(total)}) == 2


def _attends(flow: Flow, value: int, source: int) -> bool:
    """Whether a map of one activation by another lies between a source and a value."""
    todo, seen = [flow.vertex(value)], set()
    while todo:
        vertex = todo.pop()
        if vertex <= source or vertex in seen:
            continue
        seen.add(vertex)
        if flow.roles[vertex] is Role.MIX and len(flow.actives(vertex)) > 1:
            return True
        todo.extend(flow.vertex(v) for v in flow.actives(vertex))
    return False


def _factors(flow: Flow, value: int, stop: frozenset[int] = frozenset()) -> tuple[float, str | None]:
    """The constants and the learned scale that a value was multiplied by since its root, or since ``stop``."""
    factor, learned = 1.0, None
    for vertex in _carriers(flow, value):
        if vertex in stop:
            break
        if flow.names[vertex] in ("mul", "div"):
            constant, kind = _multiplier(flow, vertex)
            factor *= constant
            learned = kind or learned
    return factor, learned


def _is_shifted(flow: Flow, value: int) -> bool:
    """Whether a learned scalar was added to a value since its root (Fixup)."""
    for vertex in _carriers(flow, value):
        others = [v for v in flow.inputs[vertex] if v != flow.data[vertex]]
        single = [v for v in others if all(size == 1 for size in flow.trace.values[v].shape)]
        if flow.names[vertex] == "add" and any(flow.is_learned(v) for v in single):
            return True
    return False


def _carriers(flow: Flow, value: int) -> Iterator[int]:
    """The operators that carry a value from its root, the last one first."""
    vertex = flow.vertex(value)
    while vertex >= 0 and flow.roles[vertex] is Role.CARRY:
        yield vertex
        data = flow.data[vertex]
        if data is None:
            break
        vertex = flow.vertex(data)


def _multiplier(flow: Flow, vertex: int) -> tuple[float, str | None]:
    node = flow.trace.nodes[vertex]
    data = flow.data[vertex]
    other = next((a for a in node.args[:2] if not (isinstance(a, Ref) and a.value == data)), 1.0)
    constant: float | None = None
    if isinstance(other, Ref):
        value = flow.trace.values[other.value]
        leaf = flow.trace.leaves.get(other.value)
        if flow.is_learned(other.value):
            return 1.0, "scalar" if all(size == 1 for size in value.shape) else "vector"
        if leaf is not None and leaf.numel() == 1 and not leaf.is_meta:
            constant = float(leaf)
    elif isinstance(other, int | float) and not isinstance(other, bool):
        constant = float(other)
    if constant is None:
        return 1.0, None
    return (1 / constant if flow.names[vertex] == "div" and constant else constant), None


def _gain(flow: Flow, vertex: int) -> float:
    """The constant that a normalized input is multiplied by before the first map."""
    factor = 1.0
    value = flow.norms[vertex][1].output
    for _ in range(16):
        users = flow.consumers.get(value, [])
        if len(users) != 1 or flow.roles[users[0]] is not Role.CARRY:
            break
        if flow.names[users[0]] in ("mul", "div"):
            factor *= _multiplier(flow, users[0])[0]
        value = flow.trace.nodes[users[0]].outputs[0]
    return factor


def _last_norms(flow: Flow, add: Add) -> set[int]:
    """The norms right before the last map of a branch."""
    vertex = flow.root[add.branch]
    while vertex >= 0 and flow.roles[vertex] is Role.NORM and flow.data[vertex] is not None:
        vertex = flow.root[flow.data[vertex] or 0]
    if vertex < 0 or flow.roles[vertex] is not Role.MIX:
        return set()
    return {flow.root[v] for v in flow.actives(vertex) if flow.root[v] in flow.norms}


def _name(flow: Flow, add: Add) -> str:
    """The module that holds the whole branch, norms left out where something else remains."""
    trace = flow.trace
    mixes = [v for v in add.interior if flow.roles[v] is Role.MIX] or list(add.interior)
    paths = [trace.calls[trace.nodes[v].call].name if trace.nodes[v].call >= 0 else "" for v in mixes]
    if not paths:
        return ""
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
