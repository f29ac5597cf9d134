"""The dataflow of a trace, reduced to what decides where a norm sits.

Every operator gets a role. *Carry* operators move or scale one activation without mixing its elements (views, casts,
slices, masks, a learned scale): following them back from a value leads to its *root*. *Mix* operators are the learned
or attention-like maps that a residual branch is made of. A norm, however many operators it is made of, is one vertex.
Only activations are followed: what depends on data through an embedding, a mix or a float input. Masks, positions and
parameters are not activations, so adding a position table or scaling by a gain is a carry.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations

from normkit.audit.place.roles import CONVOLUTIONS, MIXING_POOL, Role, op_name, role_of
from normkit.audit.trace.graph import Ref, Trace


@dataclass(frozen=True, slots=True)
class NormCall:
    """One occurrence of a norm: its input values (the normalized one first), its output value, its nodes."""

    inputs: tuple[int, ...]
    output: int
    nodes: frozenset[int] | range = frozenset()


@dataclass(frozen=True, slots=True)
class NormSite:
    """One norm with all its occurrences (a module that is called several times is one norm)."""

    id: str
    calls: tuple[NormCall, ...]


_SCALES = frozenset(["mul", "div", "neg", "_to_copy", "clone"])


_LATENT_STREAMS = 8  # streams that start from learned queries: each costs one more pass


@dataclass(slots=True)
class Add:
    """A residual add: ``identity`` comes from the stream, ``branch`` is what was computed from it."""

    node: int
    identity: int  # value
    branch: int  # value
    source: int  # the stream vertex that the branch was computed from
    projected: bool = False  # the identity passes through one learned map (a projection shortcut)
    link: int | None = None  # the stream vertex before this one
    interior: frozenset[int] = field(default_factory=frozenset)
    shortcut: frozenset[int] = field(default_factory=frozenset)


class Flow:
    """Roles, roots and residual adds of a trace.

    A *vertex* is a node index; a leaf (a graph input) is the negative number ``-(value + 1)``.
    """

    def __init__(self, trace: Trace, sites: list[NormSite]) -> None:
        self.trace = trace
        count = len(trace.nodes)
        self.names = [op_name(node) for node in trace.nodes]
        self.roles = [role_of(node, name) for node, name in zip(trace.nodes, self.names, strict=True)]
        self.inputs: list[tuple[int, ...]] = [node.inputs for node in trace.nodes]
        self.norms: dict[int, tuple[int, NormCall]] = {}
        self._covered: set[int] = set()
        for number, site in enumerate(sites):
            for call in site.calls:
                self._add_norm(number, call)
        self._users: dict[int, list[int]] = {}
        for node in trace.nodes:
            for value in node.inputs:
                self._users.setdefault(value, []).append(node.index)
        self._latent: set[int] = set()  # learned or constant values that a stream starts from (object queries)
        self._plain_roles = list(self.roles)
        self._forward()
        for _ in range(_LATENT_STREAMS):
            if not self._found:
                break
            self._latent |= self._found
            self._forward()
        self.consumers: dict[int, list[int]] = {}
        for index in range(count):
            if index in self._covered and index not in self.norms:
                continue
            for value in dict.fromkeys(self.inputs[index]):
                if self.active[value]:
                    self.consumers.setdefault(value, []).append(index)

    def _add_norm(self, number: int, call: NormCall) -> None:
        vertex = self.trace.values[call.output].producer
        if vertex < 0:
            return
        self._covered.update(call.nodes)
        self.norms[vertex] = (number, call)
        self.roles[vertex] = Role.NORM
        self.inputs[vertex] = call.inputs

    # ---- one forward pass: what is an activation, where it comes from, which adds are residual ----

    def _forward(self) -> None:
        values = len(self.trace.values)
        self.roles = list(self._plain_roles)
        self.dynamic = bytearray(values)
        self.active = bytearray(values)
        self.root = [-(value + 1) for value in range(values)]
        self.data: list[int | None] = [None] * len(self.roles)
        self.adds: dict[int, Add] = {}
        for value in self.trace.inputs:
            self.dynamic[value] = 1
            self.active[value] = self.trace.values[value].dtype.is_floating_point
        self._found: set[int] = set()
        for value in self._latent:
            self.dynamic[value] = self.active[value] = 1
        for index in range(len(self.roles)):
            self._visit(index)

    def _visit(self, index: int) -> None:
        node = self.trace.nodes[index]
        role = self.roles[index]
        inputs = self.inputs[index]
        dynamic = any(self.dynamic[value] for value in inputs)
        active = any(self.active[value] for value in inputs)
        if role in (Role.MIX, Role.EMBED):
            active = dynamic
        elif not active and dynamic and self.names[index] in ("index", "gather", "index_select"):
            table = self.trace.values[inputs[0]]
            if not self.dynamic[inputs[0]] and table.dtype.is_floating_point and table.origin == "parameter":
                active, self.roles[index] = True, Role.EMBED
        for value in node.outputs:
            self.root[value] = index
            if value in self._latent:
                continue
            self.dynamic[value] = dynamic
            self.active[value] = active and self._is_float(value)
        if not active:
            if role is Role.CARRY and inputs:
                for value in node.outputs:
                    self.root[value] = self.root[inputs[0]]
            return
        if index in self._covered and role is not Role.NORM:
            return
        carried = self._carried(index, role)
        if carried is not None:
            self.data[index] = carried
            if self.roles[index] not in (Role.UNARY, Role.POOL, Role.NORM):
                self.roles[index] = Role.CARRY
                for value in node.outputs:
                    self.root[value] = self.root[carried]

    def _actives(self, index: int) -> list[int]:
        return [value for value in dict.fromkeys(self.inputs[index]) if self.active[value]]

    def _carried(self, index: int, role: Role) -> int | None:
        """The one activation that an operator carries on, if there is one."""
        actives = self._actives(index)
        if not actives:
            return None
        if role is Role.NORM:
            return actives[0]
        if role in (Role.CARRY, Role.UNARY, Role.POOL):
            return actives[-1] if self.names[index] == "copy" else actives[0]
        if role is Role.MERGE:
            return self._merged(actives)
        if role in (Role.ADD, Role.MUL):
            if len(actives) == 1:
                doubled = role is Role.MUL and self.trace.nodes[index].inputs.count(actives[0]) > 1
                if role is Role.ADD and not self._found:
                    self._find_latent(index, actives[0])
                return None if doubled else actives[0]
            if role is Role.ADD and self._one_root_scaled(index, actives):
                return actives[0]
            whole = self.trace.values[self.trace.nodes[index].outputs[0]].shape
            size = _numel(whole)
            full = [value for value in actives if _numel(self.trace.values[value].shape) == size]
            if role is Role.ADD and len(full) == 1 and self._same_tokens(actives, whole):
                self._residual(index, actives)  # one branch added to several copies of the stream
                if index in self.adds:
                    return None
            if len(full) == 1 and self.names[index] in ("mul", "add", "sub"):
                return full[0]  # the other is broadcast: a gate, a shift
            if role is Role.ADD:
                self._residual(index, actives)
        return None

    def _one_root_scaled(self, index: int, actives: list[int]) -> bool:
        """Whether a sum is of one value, scaled in several ways (mixing a stream with its own start)."""
        if len({self.root[value] for value in actives}) > 1:
            return False
        shape = self.trace.values[self.trace.nodes[index].outputs[0]].shape
        return all(self._only_scaled(value, shape) for value in actives)

    def _only_scaled(self, value: int, shape: tuple[int, ...]) -> bool:
        """Whether nothing but factors and casts lies between a value and its root."""
        vertex, root = self._vertex(value), self.root[value]
        while vertex != root:
            if vertex < 0 or self.names[vertex] not in _SCALES or self.trace.values[value].shape != shape:
                return False
            data = self.data[vertex]
            if data is None:
                return False
            value, vertex = data, self._vertex(data)
        return True

    def _same_tokens(self, actives: list[int], whole: tuple[int, ...]) -> bool:
        shapes = [self.trace.values[value].shape for value in actives]
        return all(len(shape) > 1 and shape == whole[-len(shape) :] for shape in shapes)

    def _merged(self, actives: list[int]) -> int | None:
        """What a concatenation or overwrite carries: its one root, or the latest point of one stream."""
        roots = {self.root[value]: value for value in actives}
        if len(roots) == 1:
            return actives[0]
        latest = max(roots)
        rest = set(roots) - {latest}
        for vertex in self.chain(latest):
            rest.discard(vertex)
            if not rest:
                return roots[latest]
            if vertex < min(rest):
                break
        return None

    def _is_float(self, value: int) -> bool:
        dtype = self.trace.values[value].dtype
        return dtype.is_floating_point or dtype.is_complex

    def _find_latent(self, index: int, active: int) -> None:
        """A stream may start from learned or zero queries: then a branch computed from them is added to them."""
        if any(vertex in self.adds for vertex in self.chain(self.root[active])):
            return  # already on a stream: what is added to it is a position
        shape = self.trace.values[active].shape
        for value in self.inputs[index]:
            if value == active or self.trace.values[value].shape != shape or not self._is_float(value):
                continue
            start = self.root[value]
            if self._source(start, active, 1, everything=True) is None:
                continue
            while start >= 0 and self.roles[start] in (Role.NORM, Role.ADD) and self.inputs[start]:
                start = self.root[self.inputs[start][0]]
            self._found.update((-start - 1,) if start < 0 else self.trace.nodes[start].outputs[:1])

    # ---- streams ----

    def next_link(self, vertex: int) -> int | None:
        """The stream vertex before this one, through norms, residual adds, activations and pooling."""
        if vertex < 0:
            return None
        add = self.adds.get(vertex)
        if add is not None:
            return add.link
        if self.roles[vertex] in (Role.NORM, Role.UNARY, Role.POOL):
            data = self.data[vertex]
            return None if data is None else self.root[data]
        return None

    def chain(self, vertex: int) -> Iterator[int]:
        """A vertex and the stream vertices before it, latest first."""
        current: int | None = vertex
        while current is not None:
            yield current
            current = self.next_link(current)

    def _residual(self, index: int, actives: list[int]) -> None:
        """Find out whether an add of two activations is residual, and record it."""
        name = self.names[index]
        if len({self.root[value] for value in actives}) == 1:  # saves the search
            return  # two pieces or scalings of one value, as in a rotary embedding
        first, others = actives[0], actives[1:]
        if name in ("add", "lerp") and len(actives) == 2:
            tries = [(actives[0], actives[1]), (actives[1], actives[0])]
        else:
            tries = [(first, other) for other in others]
        found: Add | None = None
        for identity, branch in tries:
            if self.is_behind(self.root[branch], self.root[identity]):
                continue  # a pooling minus what it pools
            source = self._source(self.root[identity], branch, 1)
            if source is not None and (found is None or source > found.source):
                found = Add(index, identity, branch, source, link=self.root[identity])
        if found is not None and self._is_aside(index, found.branch):
            return
        if found is None and name == "add":
            found = self._projected(index, tries) or self._mixed(index, tries) or self._gated(index, tries)
        if found is not None:
            self.adds[index] = found

    def _is_aside(self, index: int, branch: int) -> bool:
        """Whether a sum feeds maps only, and what is added goes on without it (a position in queries and keys)."""
        return self._becomes(self.trace.nodes[index].outputs[0]) == {Role.MIX} and Role.ADD in self._becomes(
            branch, index
        )

    def _becomes(self, value: int, besides: int = -1) -> set[Role]:
        """The roles of the operators that take a value, views and casts looked through."""
        found: set[Role] = set()
        todo = [value]
        while todo:
            value = todo.pop()
            if value in self.trace.outputs:
                found.add(Role.OTHER)
            for user in self._users.get(value, ()):
                if self._plain_roles[user] is Role.CARRY:
                    todo.extend(self.trace.nodes[user].outputs)
                elif user != besides:
                    found.add(self._plain_roles[user])
        return found

    def is_behind(self, vertex: int, later: int) -> bool:
        """Whether a vertex is an earlier point of the stream that ends at another one."""
        for link in self.chain(later):
            if link <= vertex:
                return link == vertex
        return False

    def _projected(self, index: int, tries: list[tuple[int, int]]) -> Add | None:
        for identity, branch in tries:
            end = self._ungated(self.root[identity])
            while end >= 0 and self.roles[end] in (Role.NORM, Role.POOL):
                data = self.data[end]
                if data is None:
                    break
                end = self.root[data]
            if end < 0 or self.roles[end] is not Role.MIX:
                continue
            actives = self._actives(end)
            if len(actives) != 1:
                continue
            start = self.root[actives[0]]
            while start >= 0 and self.roles[start] is Role.POOL and self.data[start] is not None:
                start = self.root[self.data[start] or 0]  # a shortcut that pools before its map
            data = self.data[start] if start in self.norms else None
            for begin in (start,) if data is None else (start, self.root[data]):  # the shortcut may have its own norm
                if self._source(begin, branch, 2, exact=True) is None:
                    continue
                if self._is_linear(begin, branch):
                    break
                return Add(index, identity, branch, begin, projected=True, link=begin)
        return None

    def _is_linear(self, start: int, branch: int) -> bool:
        """Whether only linear maps lie between: such a branch beside a linear map is part of that map (LoRA)."""
        todo, seen = [self._vertex(branch)], {start}
        while todo:
            vertex = todo.pop()
            if vertex in seen or vertex < max(start, 0):  # before the start, or a leaf
                continue
            seen.add(vertex)
            actives = self._actives(vertex)
            mixed = self.roles[vertex] is Role.MIX and len(actives) > 1
            if mixed or self.roles[vertex] not in (Role.CARRY, Role.MIX, Role.ADD):
                return False
            todo += [self._vertex(value) for value in actives]
        return True

    def _ungated(self, vertex: int) -> int:
        """What a gated linear unit halves and multiplies; the vertex itself where it is none."""
        data = self.data[vertex] if vertex >= 0 and self.names[vertex] == "glu" else None
        if data is not None:
            return self.root[data]
        if vertex < 0 or self.roles[vertex] is not Role.MUL:
            return vertex
        halves = set()
        for value in self._actives(vertex):
            root = self.root[value]
            data = self.data[root] if root >= 0 and self.roles[root] is Role.UNARY else None
            halves.add(root if data is None else self.root[data])
        return halves.pop() if len(halves) == 1 else vertex

    def _gated(self, index: int, tries: list[tuple[int, int]]) -> Add | None:
        """A gate times the stream plus a gate times the branch (highway)."""
        for identity, branch in tries:
            product = self.root[identity]
            if product < 0 or self.roles[product] is not Role.MUL:
                continue
            for factor in self._actives(product):
                source = self._source(self.root[factor], branch, 1)
                if source is not None:
                    return Add(index, identity, branch, source, link=self.root[factor])
        return None

    def _mixed(self, index: int, tries: list[tuple[int, int]]) -> Add | None:
        """Several copies of the stream, mixed among each other by a matrix computed from them (hyper-connections)."""
        for identity, branch in tries:
            product = self.root[identity]
            if product < 0 or self.roles[product] is not Role.MIX or len(self._actives(product)) != 2:
                continue
            for streams, matrix in permutations(self._actives(product)):
                if _numel(self.trace.values[streams].shape) != _numel(self.trace.values[identity].shape):
                    continue
                start = self.root[streams]
                if self._source(start, matrix, 1) != start:
                    continue
                source = self._source(start, branch, 1)
                if source is not None:
                    return Add(index, identity, branch, source, link=start)
        return None

    def _source(
        self, start: int, branch: int, least: int, *, exact: bool = False, everything: bool = False
    ) -> int | None:
        """The latest vertex of the stream ending at ``start`` that ``branch`` was computed from by >= ``least`` mixes.

        The search runs backwards in time, in step with the stream, and passes over the inside of residual branches
        already found, so that it costs as much as one block.
        """
        stream = iter((start,)) if exact else self.chain(start)
        target = next(stream, None)
        mixes: dict[int, int] = {}
        heap: list[int] = []

        def push(vertex: int, count: int) -> None:
            if vertex not in mixes:
                heapq.heappush(heap, -vertex)
            mixes[vertex] = max(mixes.get(vertex, 0), count)

        push(self._vertex(branch), 0)
        while heap and target is not None:
            vertex = -heapq.heappop(heap)
            while target is not None and target > vertex:
                target = next(stream, None)
            count = mixes[vertex]
            if target == vertex and count >= least:
                return vertex
            if vertex < 0:
                continue
            add = self.adds.get(vertex)
            if add is not None:
                push(self._vertex(add.identity) if not add.projected else add.link or 0, min(2, count + 1))
                continue
            mixing = self.roles[vertex] is Role.MIX or self.names[vertex] in MIXING_POOL
            for value in self.inputs[vertex] if everything else self._actives(vertex):
                push(self._vertex(value), min(2, count + mixing))
        return None

    def _vertex(self, value: int) -> int:
        producer = self.trace.values[value].producer
        return producer if producer >= 0 else -(value + 1)

    def vertex(self, value: int) -> int:
        """The vertex that made a value."""
        return self._vertex(value)

    def actives(self, index: int) -> list[int]:
        """The activations among a vertex's inputs."""
        return self._actives(index)

    def normed_factors(self, value: int, depth: int = 3) -> set[int]:
        """The norms that a value carries, through products that gate it (none of which makes it larger)."""
        root = self.root[value]
        if root in self.norms:
            return {root}
        if root < 0 or depth == 0 or self.roles[root] is not Role.MUL:
            return set()
        size = _numel(self.trace.values[self.trace.nodes[root].outputs[0]].shape)
        full = [v for v in self.actives(root) if _numel(self.trace.values[v].shape) == size]
        return {norm for v in full for norm in self.normed_factors(v, depth - 1)}

    def is_learned(self, value: int) -> bool:
        """Whether a factor is a parameter, possibly reshaped or cast."""
        for _ in range(8):
            found = self.trace.values[value]
            if found.origin == "parameter":
                return True
            if found.producer < 0 or not self.inputs[found.producer]:
                return False
            value = self.inputs[found.producer][0]
        return False

    def is_convolution(self, index: int) -> bool:
        """Whether a vertex is a convolution over space or time (a 1x1 one is a linear map)."""
        if self.names[index] not in CONVOLUTIONS:
            return False
        weight = self.trace.nodes[index].args[1]
        if not isinstance(weight, Ref):
            return False
        return any(size > 1 for size in self.trace.values[weight.value].shape[2:])


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
