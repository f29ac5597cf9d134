"""Which norms are of queries or keys: what they feed becomes the scores of an attention or a selection."""

from __future__ import annotations

from dataclasses import dataclass, field

from normkit.audit.place.flow import Add, Flow
from normkit.audit.place.roles import Role


@dataclass
class Ahead:
    """What a norm's output becomes, looking through views, sums, gates and activations."""

    identity: list[Add] = field(default_factory=list)
    branch: list[Add] = field(default_factory=list)
    mixes: list[tuple[int, int]] = field(default_factory=list)  # (vertex, the value that it takes)
    activated: bool = False
    scaled: bool = False  # a map is reached only through products with other activations
    others: int = 0
    norms: list[int] = field(default_factory=list)  # the norms that normalize it once more
    again: bool = False  # the identity paths are those of such a norm


class Scores:
    """Scores, seen from the norms that feed them."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def is_qk(self, vertex: int, ahead: Ahead) -> bool:
        """Whether all that a norm feeds is one side of attention scores."""
        if not ahead.mixes or ahead.branch:
            return False
        if not ahead.scaled and all(self._scores(mix, value) for mix, value in ahead.mixes):
            return True
        met = any(self._meets_norm(vertex, mix, value) for mix, value in ahead.mixes)
        return (met and not any(self._is_learned_map(mix) for mix, _ in ahead.mixes)) or self._contracts(vertex)

    def _is_learned_map(self, mix: int) -> bool:
        """Whether a map is of one activation by parameters."""
        actives = self.flow.actives(mix)
        return len(actives) == 1 and any(self.flow.is_learned(v) for v in self.flow.inputs[mix] if v not in actives)

    def _contracts(self, vertex: int) -> bool:
        """Whether a norm's output is multiplied elementwise by its counterpart's, as queries and keys are.

        The counterpart is a norm of something made of the same activation, or the product is summed over the features.
        """
        flow = self.flow
        width = flow.trace.values[flow.norms[vertex][1].output].shape[-1]
        todo, seen = [flow.norms[vertex][1].output], set()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            for user in flow.consumers.get(value, ()):
                out = flow.trace.nodes[user].outputs[0]
                if flow.trace.values[out].shape[-1:] != (width,):
                    continue
                if flow.roles[user] is Role.MUL:
                    met = {n for v in flow.actives(user) if v != value for n in self._norms_in(v, width)}
                    if any(self._same_source(vertex, n) for n in met - {vertex}) or (met and self._summed(out)):
                        return True
                if flow.roles[user] in (Role.MUL, Role.CARRY, Role.POOL):
                    todo.append(out)
        return False

    def _same_source(self, vertex: int, other: int) -> bool:
        """Whether two norms normalize maps of one activation."""
        return bool(self._mapped_from(vertex) & self._mapped_from(other))

    def _mapped_from(self, vertex: int) -> set[int]:
        data = self.flow.data[vertex]
        root = -1 if data is None else self.flow.root[data]
        if root < 0 or self.flow.roles[root] is not Role.MIX:
            return set()
        return {self.flow.root[v] for v in self.flow.actives(root)}

    def _norms_in(self, value: int, width: int) -> set[int]:
        """The norms whose output a value is, perhaps scaled, weighted and summed over tokens."""
        flow = self.flow
        todo, seen, found = [value], set(), set()
        while todo:
            root = flow.root[todo.pop()]
            if root in seen or root < 0:
                continue
            seen.add(root)
            if root in flow.norms and flow.trace.values[flow.norms[root][1].output].shape[-1] == width:
                found.add(root)
            elif flow.roles[root] in (Role.MUL, Role.POOL):
                todo.extend(flow.actives(root))
        return found

    def _summed(self, value: int) -> bool:
        """Whether a product is summed over its last dim, possibly after further factors."""
        flow = self.flow
        for _ in range(4):
            users = flow.consumers.get(value, [])
            if any(flow.names[u] == "sum" and _over_last(flow.trace.nodes[u].args) for u in users):
                return True
            scaled = [u for u in users if flow.roles[u] in (Role.MUL, Role.CARRY)]
            if not scaled:
                return False
            value = flow.trace.nodes[scaled[0]].outputs[0]
        return False

    def _meets_norm(self, vertex: int, mix: int, value: int) -> bool:
        """Whether a product is of one normalized activation with another (queries and keys of a linear attention)."""
        flow = self.flow
        if vertex not in flow.normed_factors(value):
            return False
        width = flow.trace.values[flow.norms[vertex][1].output].shape[-1]
        met = {root for other in flow.actives(mix) if other != value for root in flow.normed_factors(other)}
        return any(flow.trace.values[flow.norms[root][1].output].shape[-1] == width for root in met - {vertex})

    def _scores(self, mix: int, value: int) -> bool:
        flow = self.flow
        inputs = flow.inputs[mix]
        if flow.names[mix].startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
            return value in inputs[:2]
        if len(flow.actives(mix)) < 2 and not (len(inputs) > 1 and inputs[0] == inputs[1]):
            return False
        if self._to_softmax(mix):
            return True
        other = next((v for v in flow.actives(mix) if v != value), value)
        root = flow.root[other]
        return root in flow.norms

    def _to_softmax(self, mix: int) -> bool:
        """Whether a product becomes the logits of a softmax, or of a selection, before anything else is mixed in."""
        flow = self.flow
        todo, seen = [(value, 0) for value in flow.trace.nodes[mix].outputs], set()
        while todo:
            value, mixes = todo.pop()
            if (value, mixes) in seen:
                continue
            seen.add((value, mixes))
            for user in flow.consumers.get(value, ()):
                softmax = "softmax" in flow.names[user] or flow.names[user] == "logsumexp"
                if (softmax and mixes == 0) or flow.names[user] == "topk":
                    return True
                mixes_then = mixes + (flow.roles[user] is Role.MIX)
                if mixes_then < 2 and flow.roles[user] is not Role.NORM:  # heads of a selection may be summed by a map
                    todo.extend((out, mixes_then) for out in flow.trace.nodes[user].outputs)
        return False


def _over_last(args: tuple[object, ...]) -> bool:
    """Whether a sum's arguments name the last dim."""
    return len(args) > 1 and isinstance(args[1], list | tuple) and list(args[1]) == [-1]
