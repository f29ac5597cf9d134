"""The residual streams of a model: which residual adds are blocks of the model, and what each branch holds."""

from __future__ import annotations

from collections import defaultdict

from normkit.audit.place.flow import Add, Flow
from normkit.audit.place.roles import Role


class Streams:
    """The residual adds that carry the model's streams, after those inside a mixer are told apart.

    A mixer may hold skips of its own (``y + D * x`` of a state-space layer, a scan's state); those are not the stream.
    A skip around a whole stack (U-Net) must not hide the stack. The difference is in the inner chain: a stack has
    several adds in a row and norms in their branches, a skip inside a mixer has not.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        linked = {add.link for add in flow.adds.values()}
        carried_on = (call for vertex, (_, call) in flow.norms.items() if vertex in linked)
        self._normed = {flow.root[call.inputs[0]] for call in carried_on if call.inputs}
        for add in flow.adds.values():
            self._fill(add)
        self.origin = {node: self._origin(node) for node in flow.adds}
        kept = self._without_inner()
        self.adds: dict[int, Add] = {node: flow.adds[node] for node in sorted(kept)}
        self.joins: set[int] = set()
        self._drop_positional()
        self._drop_states()
        self._drop_joins()
        self.members = self._members()
        self.descends, self.reaches = self._sides()
        self.leads_out = self._before({flow.vertex(v) for v in flow.trace.outputs} or set(range(len(flow.roles))))

    def _fill(self, add: Add) -> None:
        """The vertices between the source and the branch operand, and those on a projection shortcut."""
        add.interior = self._between(add.source, add.branch)
        if add.projected:
            add.shortcut = self._between(add.link if add.link is not None else add.source, add.identity)

    def _between(self, source: int, value: int) -> frozenset[int]:
        flow = self.flow
        seen: set[int] = set()
        todo = [flow.vertex(value)]
        while todo:
            vertex = todo.pop()
            if vertex <= source or vertex in seen or vertex < 0:
                continue
            seen.add(vertex)
            todo.extend(flow.vertex(v) for v in flow.actives(vertex))
        inside: set[int] = set()
        for vertex in sorted(seen):
            if any(flow.vertex(v) == source or flow.vertex(v) in inside for v in flow.actives(vertex)):
                inside.add(vertex)
        return frozenset(inside)

    def _origin(self, node: int) -> int:
        *_, last = self.flow.chain(node)
        return last

    def _without_inner(self) -> set[int]:
        flow = self.flow
        enclosing: dict[int, list[Add]] = defaultdict(list)
        laterals: set[int] = set()
        for node, add in flow.adds.items():
            next_level = add.link in laterals and add.source != add.link
            if next_level or self._goes_around(add):
                laterals.add(node)
        for add in (add for node, add in flow.adds.items() if node not in laterals):
            for node in add.interior | add.shortcut:
                if node in flow.adds:
                    enclosing[node].append(add)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node, around in enclosing.items():
            other = [add for add in around if self.origin[add.node] != self.origin[node]]
            foreign = [add for add in other if not self.crosses(flow.adds[node], add)]
            link = flow.adds[node].link
            if not foreign and link in flow.norms:  # a skip from the norm that a branch begins with
                data = flow.data[link]
                foreign = [add for add in around if data is not None and flow.root[data] == add.source]
            if foreign:
                inner = min(foreign, key=lambda add: len(add.interior))
                groups[inner.node, self.origin[node]].append(node)
        dropped: set[int] = set()
        for nodes in groups.values():
            normed = sum(self._has_norm(flow.adds[node]) for node in nodes)
            if len(nodes) < 2 or 2 * normed < len(nodes):
                dropped.update(nodes)
        kept = set(flow.adds) - dropped - laterals
        return kept - {node for node in kept if self._is_lateral(flow.adds[node], kept)}

    def _is_lateral(self, add: Add, kept: set[int]) -> bool:
        """Whether a projection goes around a stack of blocks (a pyramid's lateral connection): no block has one."""
        blocks = [n for n in add.interior if n in kept and self._has_norm(self.flow.adds[n])] if add.projected else ()
        return any(self.origin[node] != self.origin[add.node] for node in blocks)

    def _goes_around(self, add: Add) -> bool:
        """Whether several blocks of the very stream that a projection starts from lie beside it: it is lateral too."""
        if not add.projected:
            return False
        beside = [n for n in add.interior if n in self.flow.adds and self._has_norm(self.flow.adds[n])]
        return sum(self.flow.is_behind(add.source, node) for node in beside) > 1

    def crosses(self, inner: Add, add: Add) -> bool:
        """Whether an add inside another one's branch goes on with a stream from outside: streams that attend to others.

        The block before it lies on another stream, outside the branch.
        """
        if self.origin[inner.node] == self.origin[add.node]:
            return False
        links = self.flow.chain(inner.link) if inner.link is not None else ()
        before = next((link for link in links if link in self.flow.adds), None)
        return before is not None and before not in add.interior and before not in add.shortcut

    def _has_norm(self, add: Add) -> bool:
        flow = self.flow
        if any(vertex in flow.norms for vertex in add.interior):
            return True
        return add.link in flow.norms or add.node in self._normed

    def _drop_positional(self) -> None:
        """A convolution added to the embeddings before the first layer encodes positions; it is no block."""
        flow = self.flow
        for node, add in list(self.adds.items()):
            if add.link is not None and any(vertex in self.adds for vertex in flow.chain(add.link)):
                continue
            mixes = [v for v in add.interior if flow.roles[v] is Role.MIX]
            reads_normed = any(
                v in flow.norms and flow.root[flow.norms[v][1].inputs[0]] == add.source for v in add.interior
            )
            later = [a for a in self.adds.values() if self.origin[a.node] == self.origin[node] and a.node > node]
            matmul = [any(self.is_matmul(v) for v in a.interior) for a in later]
            if mixes and all(flow.is_convolution(v) for v in mixes) and not reads_normed and matmul and all(matmul):
                del self.adds[node]

    def _drop_states(self) -> None:
        """A state carried inside a mixer (chunks of a linear attention) has no norms and starts inside a branch."""
        groups: dict[int, list[Add]] = defaultdict(list)
        for node, add in self.adds.items():
            groups[self.origin[node]].append(add)
        for origin, group in groups.items():
            if any(self._has_norm(add) for add in group):
                continue
            others = (add for add in self.adds.values() if self.origin[add.node] != origin)
            if any(group[0].source in add.interior for add in others):
                for add in group:
                    del self.adds[add.node]

    def _drop_joins(self) -> None:
        """Where two points of streams are added as they are (a long skip, the end of ResiDual), no branch ends."""
        flow = self.flow
        for node, add in self.adds.items():
            sums = (link for link in flow.chain(flow.root[add.branch]) if link in flow.adds)
            if next(sums, None) in self.adds:
                self.joins.add(node)
        for node in self.joins:
            del self.adds[node]

    def is_matmul(self, vertex: int) -> bool:
        """Whether a vertex mixes other than by a convolution over space."""
        return self.flow.roles[vertex] is Role.MIX and not self.flow.is_convolution(vertex)

    def _members(self) -> set[int]:
        """Every vertex that lies on a stream: adds, origins, norms on the identity path."""
        members: set[int] = set()
        for add in self.adds.values():
            members.add(add.node)
            if add.link is None:
                continue
            for vertex in self.flow.chain(add.link):
                if vertex in members:
                    break
                members.add(vertex)
        return members

    def _sides(self) -> tuple[set[int], set[int]]:
        """The vertices computed from some residual add, and those that some residual add is computed from."""
        flow = self.flow
        after: set[int] = set()
        for index in range(len(flow.roles)):
            if any(flow.vertex(v) in after or flow.vertex(v) in self.adds for v in flow.actives(index)):
                after.add(index)
        return after, self._before(set(self.adds))

    def _before(self, ends: set[int]) -> set[int]:
        """Some vertices, and those whose activations they are computed from."""
        before = set(ends)
        for index in range(len(self.flow.roles) - 1, -1, -1):
            if index in before:
                before.update(self.flow.vertex(v) for v in self.flow.actives(index))
        return before

    def last_add(self, vertex: int) -> Add | None:
        """The latest block whose sum a vertex carries (through norms, activations, pooling and concatenation)."""
        flow = self.flow
        todo, seen = [vertex], set()
        found: list[int] = []
        while todo:
            link = start = todo.pop()
            for link in flow.chain(start):
                if link in self.adds or link in seen:
                    break
                seen.add(link)
                if link in self.joins:
                    todo.append(flow.root[flow.adds[link].branch])
            if link in self.adds:
                found.append(link)
            elif link >= 0 and flow.roles[link] is Role.MERGE:
                todo.extend(flow.root[value] for value in flow.actives(link))
        return self.adds[max(found)] if found else None

    def continues(self, earlier: Add, later: Add) -> bool:
        """Whether a block's sum, or a branch that it lies in, comes before another block on one stream."""
        adds = self.flow.adds
        for link in self.flow.chain(later.link) if later.link is not None else ():
            if link < earlier.node:
                return False
            if link == earlier.node or (link in adds and earlier.node in adds[link].interior):
                return True
        return False

    def continued(self) -> set[int]:
        """The origins of streams from whose blocks another stream starts: a stage of a hierarchy, a backbone."""
        flow = self.flow
        behind: dict[int, frozenset[int]] = {}  # vertex -> origins of the adds that it is computed from
        for index in range(len(flow.roles)):
            sources = {flow.vertex(v) for v in flow.actives(index)}
            found = frozenset().union(*(behind.get(v, frozenset()) for v in sources))
            if index in self.adds:
                found |= {self.origin[index]}
            if found:
                behind[index] = found
        return {
            origin
            for node, add in self.adds.items()
            for origin in behind.get(add.source, frozenset())
            if origin != self.origin[node]
        }
