"""Where each norm sits on the residual stream, and what each residual branch is made of.

Decided from the dataflow alone. A norm's place follows from what it reads (the stream, or something inside a branch)
and from what its output becomes first: the identity operand of a residual add, the branch operand, the input of a
learned map, or a query or key.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from normkit.audit.place.branches import Branch, describe
from normkit.audit.place.conv import Convolutions
from normkit.audit.place.flow import Add, Flow, NormCall, NormSite
from normkit.audit.place.roles import Role
from normkit.audit.place.scores import Ahead, Scores
from normkit.audit.place.streams import Streams
from normkit.audit.trace.graph import Trace

NormPlacement = Literal["pre", "post", "output", "final", "embedding", "qk", "inner", "conv", "head"]

__all__ = ["Branch", "NormCall", "NormPlacement", "NormSite", "PlaceResult", "module_norm", "place"]


@dataclass
class PlaceResult:
    """Placements by norm id, and the residual branches in depth order."""

    placements: dict[str, NormPlacement] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    calls: dict[str, list[NormPlacement]] = field(default_factory=dict)  # per norm: one entry a call
    streams: dict[str, int] = field(default_factory=dict)  # per norm: the stream it serves, where there is one
    continued: set[int] = field(default_factory=set)  # streams that another one starts from


def module_norm(trace: Trace, name: str) -> NormSite:
    """The norm that a module is: all its calls, with their float tensors as inputs."""
    calls = []
    for call in trace.calls_of(name):
        floats = [v for v in dict.fromkeys(call.inputs) if trace.values[v].dtype.is_floating_point]
        outputs = [v for v in call.outputs if trace.values[v].dtype.is_floating_point]
        if floats and outputs and trace.values[outputs[0]].producer >= 0:
            calls.append(NormCall(tuple(floats), outputs[0], call.nodes))
    return NormSite(name, tuple(calls))


def place(trace: Trace, norms: list[NormSite]) -> PlaceResult:
    """Decide where each norm sits, and describe each residual branch.

    Args:
        trace: the recorded run.
        norms: the norms, each with its occurrences in the trace.

    Returns:
        One placement a norm (of several calls the most frequent), and the branches of all streams.
    """
    flow = Flow(trace, norms)
    streams = Streams(flow)
    placer = _Placer(flow, streams)
    by_vertex = placer.place_all()
    numbers: dict[int, int] = {}
    for node in streams.adds:
        numbers.setdefault(streams.origin[node], len(numbers))
    result = PlaceResult(placements={site.id: "inner" for site in norms}, calls={site.id: [] for site in norms})
    for vertex, seat in by_vertex.items():
        name = norms[flow.norms[vertex][0]].id
        result.calls[name].append(seat)
        origin = placer.stream_of(vertex)
        if origin is not None:
            result.streams.setdefault(name, numbers[origin])
    for name, found in result.calls.items():
        if found:
            result.placements[name] = Counter(reversed(found)).most_common(1)[0][0]
    names = {vertex: norms[number].id for vertex, (number, _) in flow.norms.items()}
    result.branches = describe(flow, streams, placer.seats, names)
    result.continued = {numbers[origin] for origin in streams.continued()}
    return result


class _Placer:
    def __init__(self, flow: Flow, streams: Streams) -> None:
        self.flow = flow
        self.streams = streams
        self.scores = Scores(flow)
        self.seats: dict[int, NormPlacement] = {}  # by dataflow, before norms around convolutions are renamed
        self._linked: dict[int, Add] = {}  # what both a branch and its projection shortcut read
        for add in streams.adds.values():
            for link in flow.chain(add.link) if add.projected and add.link is not None else ():
                if link in streams.adds:
                    break
                self._linked.setdefault(link, add)
        self._inside: set[int] = set().union(*(add.interior for add in streams.adds.values()))
        self.around: dict[int, list[Add]] = {}
        for add in streams.adds.values():
            for vertex in add.interior | add.shortcut:
                if vertex in flow.norms:
                    self.around.setdefault(vertex, []).append(add)

    def place_all(self) -> dict[int, NormPlacement]:
        """The placement of every occurrence, in the order of the run."""
        aheads = {vertex: self._ahead(vertex) for vertex in sorted(self.flow.norms)}
        for ahead in reversed(aheads.values()):  # a norm of a norm: the first is where the second one is
            if not (ahead.identity or ahead.branch):
                ahead.identity = next((aheads[n].identity for n in ahead.norms if aheads[n].identity), [])
                ahead.again = bool(ahead.identity)
        for vertex, ahead in aheads.items():
            self.seats[vertex] = self._seat(vertex, ahead)
        for vertex, ahead in aheads.items():
            direct = ahead.identity and not ahead.again
            if self.seats[vertex] == "embedding" and direct and self._opens_block(vertex, ahead, aheads):
                self.seats[vertex] = "post"
        conv = Convolutions(self.flow, self.streams, self.around, self._linked)
        return {
            vertex: "conv" if conv.holds(vertex, ahead, self.seats[vertex]) else self.seats[vertex]
            for vertex, ahead in aheads.items()
        }

    def stream_of(self, vertex: int) -> int | None:
        """The origin of the stream that a norm serves."""
        inside = self._innermost(vertex)
        data = self.flow.data[vertex]
        if inside is None and data is not None:
            inside = self.streams.last_add(self.flow.root[data])
        if inside is None:
            ahead = self._ahead(vertex)
            inside = next(iter(ahead.identity), None)
        return None if inside is None else self.streams.origin[inside.node]

    # ---- the call tree: which norm belongs to which block, where the dataflow is the same either way ----

    def _relation(self, vertex: int, node: int) -> tuple[int, int]:
        """How many calls up from the caller of a norm, and from the holder of an add, their common call lies."""
        trace = self.flow.trace
        ups = self._ancestors(self._caller(vertex))
        holders = self._ancestors(trace.nodes[node].call)
        common = next((c for c in ups if c in holders), -1)
        return ups.index(common), holders.index(common)

    def _caller(self, vertex: int) -> int:
        """The call of the module that a norm, itself a module or not, is part of."""
        calls = self.flow.trace.calls
        nodes = self.flow.norms[vertex][1].nodes
        caller = self.flow.trace.nodes[vertex].call
        while caller >= 0 and nodes and all(n in nodes for n in calls[caller].nodes):
            caller = calls[caller].parent
        return caller

    def _ancestors(self, call: int) -> list[int]:
        found = []
        while call >= 0:
            found.append(call)
            call = self.flow.trace.calls[call].parent
        return [*found, -1]

    def _opens_block(self, vertex: int, ahead: Ahead, aheads: dict[int, Ahead]) -> bool:
        """The first norm of a stack whose blocks each begin by normalizing the stream itself."""
        if self._relation(vertex, ahead.identity[0].node)[0] != 0:
            return False
        for other, seat in self.seats.items():
            data = self.flow.data[other]
            if seat != "post" or data is None or not aheads[other].identity:
                continue
            behind = self.streams.last_add(self.flow.root[data])
            apart = behind is not None and self._relation(other, behind.node)[0] != 0
            if apart and self._relation(other, aheads[other].identity[0].node)[0] == 0:
                return True
        return False

    # ---- by dataflow ----

    def _seat(self, vertex: int, ahead: Ahead) -> NormPlacement:
        flow, streams = self.flow, self.streams
        data = flow.data[vertex]
        if data is None:  # normalizes a table, not an activation
            return "inner"
        root = flow.root[data]
        last = streams.last_add(root)
        inside = self._innermost(vertex)
        if inside is not None and last is not None and last.node in inside.interior:
            blocks = sum(node in inside.interior for node in streams.adds)
            apart = blocks > 1 or streams.crosses(last, inside)
            inside = None if apart else inside  # it ends a stack that a long skip goes around, or is of another stream
        if ahead.identity:
            return self._on_identity(vertex, root, last)
        if vertex in self._linked and last is not None and root == last.node and self._is_last_post(vertex, last):
            return "post"
        if vertex in self._linked:  # a projection shortcut reads it too, so the stream itself stays as it is
            return "pre" if last is not None or vertex in streams.descends else "embedding"
        if inside is not None:
            on_stream = self._on_stream(data)
            if inside in ahead.branch and not on_stream:
                return "output"
            if on_stream:
                return "pre"
            return "qk" if self.scores.is_qk(vertex, ahead) else "inner"
        if last is not None:
            return self._after(vertex, root, last, ahead)
        if vertex in streams.descends:
            if self._starts_stream(ahead):
                return "embedding"
            if vertex not in streams.reaches and vertex in self.streams.leads_out:
                return "head"
            if self.scores.is_qk(vertex, ahead):
                return "qk"
            return "head" if self._leaves(vertex) else "inner"
        if vertex in streams.reaches:
            return "pre" if self._feeds_branches(ahead) else "embedding"
        return "qk" if self.scores.is_qk(vertex, ahead) else "inner" if ahead.mixes else "head"

    def _leaves(self, vertex: int) -> bool:
        """Whether what is made of a norm becomes an output of the model without being added to a stream."""
        flow = self.flow
        todo, seen = [flow.norms[vertex][1].output], set()
        while todo:
            value = todo.pop()
            if value in flow.trace.outputs:
                return True
            for user in flow.consumers.get(value, ()):
                if user not in seen and user not in self.streams.adds:
                    seen.add(user)
                    todo.extend(flow.trace.nodes[user].outputs)
        return False

    def _overwritten(self, value: int) -> list[int]:
        """The parts of a value that was put together on its way from its root (some tokens replaced)."""
        flow = self.flow
        vertex, root = flow.vertex(value), flow.root[value]
        parts: list[int] = []
        while vertex >= 0 and vertex != root and flow.data[vertex] is not None:
            if flow.names[vertex] in ("masked_scatter", "index_put", "where"):
                parts.extend(flow.actives(vertex))
            vertex = flow.vertex(flow.data[vertex] or 0)
        return parts

    def _on_identity(self, vertex: int, root: int, last: Add | None) -> NormPlacement:
        """A norm that the next block's identity path starts from: of a block, of a whole stack, or of a new stream."""
        if last is None or not self._all_from_blocks(root):
            return "embedding"
        reads_normed = any(
            v in self.flow.norms and self._on_stream(self.flow.norms[v][1].inputs[0]) for v in last.interior
        )
        apart = self._relation(vertex, last.node)
        between = [n for n in self._norms_behind(root) if self.flow.next_link(n) == last.node]
        behind = root == last.node or bool(between)
        ends = (reads_normed or bool(between)) and apart[1] > 0 and self._is_stack(vertex)
        return "final" if behind and ends and not self._ends_block(vertex, last) else "post"

    def _ends_block(self, vertex: int, last: Add) -> bool:
        """Whether a norm ends a block of unlike sublayers, and calls beside it on the stream end so too (Conformer)."""
        calls, caller = self.flow.trace.calls, self._caller(vertex)
        if caller < 0 or self._holds_like_blocks(caller, last):
            return False
        for other in self.flow.norms:
            data, beside = self.flow.data[other], self._caller(other)
            if beside in (-1, caller) or data is None or calls[beside].parent != calls[caller].parent:
                continue
            behind = self.streams.last_add(self.flow.root[data])
            if behind is None or self.streams.origin[behind.node] != self.streams.origin[last.node]:
                continue
            if behind.node in calls[beside].nodes and self._relation(other, behind.node) == self._relation(
                vertex, last.node
            ):
                return True
        return False

    def _holds_like_blocks(self, caller: int, last: Add) -> bool:
        """Whether the blocks inside a call all run the same operators: a stack of layers."""
        trace, kinds = self.flow.trace, []
        for node in self.streams.adds:
            if node not in trace.calls[caller].nodes or self.streams.origin[node] != self.streams.origin[last.node]:
                continue
            ups = self._ancestors(trace.nodes[node].call)
            place = ups.index(caller)
            if place == 0:
                return False
            kinds.append(tuple(self.flow.names[n] for n in trace.calls[ups[place - 1]].nodes))
        return len(set(kinds)) == 1

    def _all_from_blocks(self, root: int) -> bool:
        """Whether every part of a concatenation comes from some block of a stream."""
        if root < 0 or self.flow.roles[root] is not Role.MERGE:
            return True
        return all(self.streams.last_add(self.flow.root[v]) is not None for v in self.flow.actives(root))

    def _is_stack(self, vertex: int) -> bool:
        """Whether the module that a norm is called in holds at least two blocks before it."""
        caller = self._caller(vertex)
        nodes = self.flow.trace.calls[caller].nodes if caller >= 0 else range(vertex)
        return sum(nodes.start <= node < vertex for node in self.streams.adds) > 1

    def _innermost(self, vertex: int) -> Add | None:
        around = self.around.get(vertex)
        return min(around, key=lambda add: len(add.interior)) if around else None

    def _on_stream(self, value: int) -> bool:
        """Whether a value is the stream, or is put together from pieces of it."""
        flow = self.flow
        todo, seen = [value], set()
        while todo:
            value = todo.pop()
            root = flow.root[value]
            if value in seen:
                continue
            seen.add(value)
            if root in self.streams.members:
                return True
            todo.extend(self._overwritten(value))
            if root >= 0 and flow.roles[root] is Role.MERGE:
                todo.extend(flow.actives(root))
            summed = flow.data[root] if root >= 0 and flow.names[root] == "sum" else None
            if summed is not None:
                todo.append(summed)  # the weighted sum of several copies of the stream
        return False

    def _after(self, vertex: int, root: int, last: Add, ahead: Ahead) -> NormPlacement:
        """A norm on the stream behind the last block that it can see: final, or the post-norm of that block."""
        flow = self.flow
        stage = self._next_stage(vertex, last, ahead)
        if stage is not None:
            return stage
        if self._opens_other_branch(vertex, last, ahead):
            return "pre"
        if root == last.node and self._is_last_post(vertex, last):
            return "post"
        if any(link in flow.norms and self.seats.get(link) == "final" for link in self._norms_behind(root)):
            return "embedding" if vertex in self.streams.reaches and self._starts_stream(ahead) else "final"
        if self._rejoins(vertex, last):
            return "pre"
        return "head" if self._compares(vertex, ahead) else "final"

    def _compares(self, vertex: int, ahead: Ahead) -> bool:
        """Whether all that a norm feeds is a product with another norm's output (similarities of embeddings)."""
        flow = self.flow
        others = [v for mix, value in ahead.mixes for v in flow.actives(mix) if v != value]
        return bool(others) and len(others) == len(ahead.mixes) and all(flow.root[v] in flow.norms for v in others)

    def _rejoins(self, vertex: int, last: Add) -> bool:
        """Whether what is computed from a norm comes back to the stream that it reads (a router, a correction)."""
        if vertex not in self.streams.reaches:
            return False
        flow = self.flow
        todo, seen = [flow.norms[vertex][1].output], set()
        while todo:
            for user in flow.consumers.get(todo.pop(), ()):
                if user in seen:
                    continue
                seen.add(user)
                add = self.streams.adds.get(user)
                if add is not None and last.node not in add.interior and self.streams.continues(last, add):
                    return True
                todo.extend(flow.trace.nodes[user].outputs)
        return False

    def _opens_other_branch(self, vertex: int, last: Add, ahead: Ahead) -> bool:
        """Whether a norm is the part of a branch of another stream that normalizes what that branch attends to."""
        caller = self._caller(vertex)
        if caller < 0 or not ahead.mixes or ahead.others or ahead.branch:
            return False
        nodes = self.flow.trace.calls[caller].nodes
        fed = {mix for mix, _ in ahead.mixes}
        met = [mix in self._inside or any(v in self._inside for v, _ in self._ahead(mix).mixes) for mix in fed]
        return last.node not in nodes and all(met) and all(mix in nodes for mix in fed)

    def _norms_behind(self, root: int) -> list[int]:
        found = []
        for link in self.flow.chain(root):
            if link in self.streams.adds:
                break
            if link in self.flow.norms:
                found.append(link)
        return found

    def _is_last_post(self, vertex: int, last: Add) -> bool:
        """Whether a norm behind the last add is one more of the stream's post-norms, or stands by itself."""
        origin = self.streams.origin
        peers = []
        for other, seat in self.seats.items():
            data = self.flow.data[other]
            behind = None if data is None else self.streams.adds.get(self.flow.root[data])
            if seat == "post" and behind is not None and origin[behind.node] == origin[last.node]:
                peers.append((other, behind))
        if not peers:
            return self._is_post_block(last)
        relation, kind = self._relation(vertex, last.node), self._kind(last)
        return any(self._relation(other, add.node) == relation and self._kind(add) == kind for other, add in peers)

    def _kind(self, add: Add) -> tuple[bool, bool]:
        """Whether a branch has norms at its ends, and whether its identity comes straight from the add before it."""
        normed = any(self.seats.get(v) in ("pre", "output") for v in add.interior if v in self.flow.norms)
        return normed, add.link in self.streams.adds

    def _is_post_block(self, add: Add) -> bool:
        """Whether a block without norms of its own ends here, so that a norm behind it is its N_stream."""
        seats = {self.seats.get(vertex) for vertex in add.interior if vertex in self.flow.norms}
        if seats - {"qk"}:
            return False
        for link in self.flow.chain(add.link) if add.link is not None else ():
            if link in self.streams.adds:
                return False
            if link in self.flow.norms:
                return True
        return True

    def _next_stage(self, vertex: int, last: Add, ahead: Ahead) -> NormPlacement | None:
        """A norm between two stages of a hierarchy: all it feeds is one map that changes the grid or the width."""
        flow = self.flow
        if ahead.branch or ahead.others or not ahead.mixes:
            return None
        call = flow.norms[vertex][1]
        width = flow.trace.values[call.output].shape[-1:]
        widened = width != flow.trace.values[flow.trace.nodes[last.node].outputs[0]].shape[-1:]
        for mix, _ in ahead.mixes:
            strided = flow.is_convolution(mix)
            if not (strided or widened) or len(flow.actives(mix)) != 1:
                return None
            beyond = self._ahead(mix)
            if not beyond.identity:
                return None
        return "conv" if any(flow.is_convolution(mix) for mix, _ in ahead.mixes) else "embedding"

    def _feeds_branches(self, ahead: Ahead) -> bool:
        """Whether all that a norm feeds are keys and values of branches (the context of a cross-attention)."""
        return bool(ahead.mixes) and all(
            any(vertex in self._inside for vertex, _ in self._ahead(mix).mixes) and not self._ahead(mix).identity
            for mix, _ in ahead.mixes
        )

    def _starts_stream(self, ahead: Ahead) -> bool:
        """Whether what is computed from a norm becomes the start of another stream."""
        todo = [mix for mix, _ in ahead.mixes]
        seen: set[int] = set()
        while todo:
            vertex = todo.pop()
            if vertex in seen or vertex in self._inside:
                continue
            seen.add(vertex)
            beyond = self._ahead(vertex)
            if beyond.identity:
                return True
            todo.extend(mix for mix, _ in beyond.mixes)
        return False

    # ---- looking ahead ----

    def _size(self, value: int) -> int:
        return math.prod(self.flow.trace.values[value].shape)

    def _ahead(self, vertex: int) -> Ahead:
        flow = self.flow
        call = flow.norms.get(vertex)
        outputs = (call[1].output,) if call else flow.trace.nodes[vertex].outputs
        size = self._size(outputs[0])
        ahead = Ahead()
        todo = [(value, True) for value in outputs]
        seen: set[int] = set()
        while todo:
            value, pure = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            for user in flow.consumers.get(value, ()):
                add = self.streams.adds.get(user)
                role = flow.roles[user]
                if add is None and self._is_weight(value, user):
                    continue
                if add is not None:
                    (ahead.identity if value == add.identity else ahead.branch).append(add)
                elif role is Role.MIX:
                    ahead.mixes.append((user, value))
                    ahead.scaled |= not pure
                elif role is Role.NORM or role is Role.OTHER:
                    ahead.others += 1
                    if flow.data[user] == value and role is Role.NORM:
                        ahead.norms.append(user)
                elif role is Role.MUL:
                    todo.extend((out, False) for out in flow.trace.nodes[user].outputs)
                else:
                    if role is Role.UNARY and pure:
                        ahead.activated = True
                    turned = flow.names[user] == "sum" and self._size(flow.trace.nodes[user].outputs[0]) == size
                    keeps = role in (Role.CARRY, Role.ADD, Role.MERGE) or turned  # by constant matrices (rotary)
                    todo.extend((out, pure and keeps) for out in flow.trace.nodes[user].outputs)
            if value in flow.trace.outputs:
                ahead.others += 1
        return ahead

    def _is_weight(self, value: int, user: int) -> bool:
        """Whether a product takes a value as the factor of a larger activation: a share of it, not a part of it."""
        flow = self.flow
        if flow.names[user] not in ("mul", "div") or len(flow.actives(user)) < 2:
            return False
        largest = max(self._size(v) for v in flow.actives(user))
        return self._size(value) < largest == self._size(flow.trace.nodes[user].outputs[0])
