"""Norms written as operators, in no module of their own.

A statistic is followed through the operators until the value that it was formed of is divided by it. That slice of the
trace, with the parameters that it reads as tensors of its own, is then probed like any module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normkit.audit.find.half import HALF, counterpart, in_half
from normkit.audit.find.lookalikes import is_lookalike
from normkit.audit.find.operators import (
    ADDS,
    CASTS,
    FIXED,
    FUSED,
    MIXING,
    ROOT,
    VIEWS,
    WEIGHT_NORM,
    numel,
    packet,
    sums_by_product,
)
from normkit.audit.identify import Identification, identify
from normkit.audit.identify.probe import has_values
from normkit.audit.place import NormCall
from normkit.audit.trace.graph import (
    BATCH_MODE,
    ModuleCall,
    Node,
    Ref,
    ReplayError,
    TensorInfo,
    Trace,
    Value,
    holds_running_statistics,
)

WEIGHT_NORMALIZATION = Identification(
    kind="other", spec=None, reason="weight normalization: it normalizes a weight, not activations"
)
_LOOK_AHEAD = 12
"""How many operators a statistic may pass (eps, root, expand, casts) before it divides."""
_LONGEST = 40
"""How many operators a norm may have."""
_BROADCASTS = frozenset(["expand", "view", "_unsafe_view", "unsqueeze", "clone"])


@dataclass
class Occurrence:
    """One norm, with every call of it."""

    name: str
    class_name: str
    identification: Identification
    calls: list[NormCall] = field(default_factory=list)
    module: nn.Module | None = None
    example: TensorInfo | None = None

    @property
    def functional(self) -> bool:
        """Not a norm module of the model's own: written inline, or a parametrization of a weight."""
        return self.module is None or self.identification is WEIGHT_NORMALIZATION


@dataclass(frozen=True)
class Match:
    """A slice of operators that is a norm."""

    identification: Identification
    call: NormCall
    source: int


class _Shared:
    """Something that copies of a module go on sharing, because it is only read."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class Replay(nn.Module):
    """A recorded slice of operators as a module of one input, for probing.

    The parameters and buffers that the slice reads are tensors of this module, so that their part in the norm can be
    measured; ``names`` says what they are called in the model. Batch norms that hold running statistics follow this
    module's mode, as a module's would.
    """

    def __init__(self, trace: Trace, source: int, output: int, nodes: tuple[int, ...]) -> None:
        super().__init__()
        self._shared = _Shared(trace)
        self._slice = (source, output, nodes)
        self._fixed = any(packet(trace.nodes[n]) in FIXED for n in nodes)
        self.names: dict[str, str] = {}
        self._values: dict[str, int] = {}
        self.training = _in_training(trace, nodes)
        for value in _leaves(trace, nodes, source):
            self._hold(trace.values[value], trace.leaves[value])

    def _hold(self, value: Value, leaf: Tensor) -> None:
        key = f"t{len(self.names)}"
        own = leaf.detach() if has_values(leaf) else torch.empty(value.shape, dtype=value.dtype, device="meta")
        if value.origin == "parameter":
            self.register_parameter(key, nn.Parameter(own, requires_grad=False))
        else:
            self.register_buffer(key, own)
        self.names[key] = value.name
        self._values[key] = value.index

    def forward(self, x: Tensor) -> Tensor:
        """Run the slice on another input."""
        source, output, nodes = self._slice
        if self._fixed and tuple(x.shape) != self._shared.trace.values[source].shape:
            raise ReplayError("an operator of the slice holds the shape that it was recorded with")
        feeds = {source: x} | {value: getattr(self, key) for key, value in self._values.items()}
        recorded = self._shared.trace.values[source].dtype
        casts = {recorded: x.dtype} if recorded in HALF else None  # a cast to the input's dtype follows the input's
        return self._shared.trace.replay(nodes, feeds, training=self.training, casts=casts)[output]


def renamed(found: Identification, name: Callable[[str], str | None]) -> Identification:
    """With other names for the tensors that have a part in the norm."""

    def other(old: str | None) -> str | None:
        return None if old is None else name(old)

    return replace(
        found,
        weight=other(found.weight),
        bias=other(found.bias),
        running_mean=other(found.running_mean),
        running_var=other(found.running_var),
    )


def _in_training(trace: Trace, nodes: Sequence[int]) -> bool:
    return any(holds_running_statistics(n) and bool(n.args[BATCH_MODE]) for n in (trace.nodes[i] for i in nodes))


def _leaves(trace: Trace, nodes: Sequence[int], source: int) -> list[int]:
    """The floating-point parameters and buffers that a slice reads."""
    read = dict.fromkeys(v for n in nodes for v in trace.nodes[n].inputs)
    return [
        v for v in read
        if v != source and trace.values[v].origin in ("parameter", "buffer") and trace.values[v].dtype.is_floating_point
    ]  # fmt: skip


class InlineNorms:
    """Finds the norms that leads (operators that form a statistic) belong to.

    Args:
        trace: the recorded run.
        claimed: the nodes of norms found already; grows while others are looked for.
        alone: whether the trace is one of a single call in half precision, made to see how a norm rounds.
    """

    def __init__(self, trace: Trace, claimed: set[int], *, alone: bool = False) -> None:
        self.trace = trace
        self._alone = alone
        self.claimed = claimed
        self.products = sums_by_product(trace)
        self.consumers: dict[int, list[int]] = {}
        self._known: dict[int, Match | None] = {}
        self._ends: set[int] = set()  # the last operators of norms: what follows one may be normalized once more
        self._identified: dict[str, Identification] = {}
        self._dynamic = bytearray(len(trace.values))
        for value in trace.inputs:
            self._dynamic[value] = 1
        for node in trace.nodes:
            dynamic = False
            for value in node.inputs:
                self.consumers.setdefault(value, []).append(node.index)
                dynamic |= bool(self._dynamic[value])
            if dynamic:
                for value in node.outputs:
                    self._dynamic[value] = 1

    def depends_on_input(self, value: int) -> bool:
        """Whether a value was computed from the model's inputs rather than from its parameters alone."""
        return bool(self._dynamic[value])

    def is_read(self, value: int) -> bool:
        """Whether anything becomes of a value: an operator reads it, or it is an output of the model."""
        return value in self.consumers or value in self.trace.outputs

    def match(self, lead: int) -> Match | None:
        """The norm that a lead is the statistic of."""
        if lead not in self._known:
            self._known[lead] = self._match(lead)
        return self._known[lead]

    def _match(self, lead: int) -> Match | None:
        node = self.trace.nodes[lead]
        if packet(node) in ROOT:
            return None
        if packet(node) in WEIGHT_NORM:
            call = NormCall(node.inputs, node.outputs[0], frozenset((node.index,)))
            return Match(WEIGHT_NORMALIZATION, call, node.inputs[0])
        if packet(node) in FUSED and not self.depends_on_input(node.outputs[0]):
            output = self._fused_endings(node.outputs[0])[0]
            nodes = frozenset(self.trace.slice(node.inputs[:1], output))
            return Match(WEIGHT_NORMALIZATION, NormCall(node.inputs[:1], output, nodes), node.inputs[0])
        for output in self._endings(node):
            found = None
            for source in self._sources(node, self.trace.values[output].shape):
                found = self._probe(node, source, output) or found  # a farther source takes in its casts
            if found is not None:
                return found
        return None

    def all(self, leads: Sequence[int]) -> Iterator[Occurrence]:
        """The norms of some leads; what a module does at each of its calls is one norm."""
        trace = self.trace
        taken: set[int] = set()
        found: dict[tuple[str, int], Occurrence] = {}
        numbers: dict[tuple[int, str], int] = {}
        for lead in leads:
            match = None if lead in taken else self.match(lead)
            if match is None or not self.is_read(match.call.output):
                continue
            taken.update(match.call.nodes)
            self._ends.add(trace.values[match.call.output].producer)
            owner = trace.nodes[lead].call
            name = trace.calls[owner].name if owner >= 0 else ""
            number = numbers[owner, name] = numbers.get((owner, name), -1) + 1
            if (name, number) in found:
                found[name, number].calls.append(match.call)
                continue
            value = trace.values[match.source]
            example = TensorInfo(match.source, value.shape, (), value.dtype, torch.device("meta"))
            found[name, number] = Occurrence(
                f"{name}#{number}", "inline", match.identification, [match.call], None, example
            )
        yield from found.values()

    def whole(self, call: ModuleCall, leads: Sequence[int]) -> Match | None:
        """The norm inside a module that is one norm with something elementwise behind it (an activation)."""
        inside = [n for n in leads if n in call.nodes]
        matches: list[Match] = []
        for lead in inside:
            if any(lead in m.call.nodes for m in matches):
                continue
            match = self.match(lead)
            if match is not None:
                matches.append(match)
        if len(matches) != 1 or matches[0].identification.spec is None:
            return None
        nodes = matches[0].call.nodes
        if any(n not in call.nodes for n in nodes):
            return None
        reads_input = any(v in call.inputs for v in (matches[0].source, *self._behind(matches[0].source)))
        return matches[0] if reads_input and self._holds_nothing_else(call, nodes) else None

    def _behind(self, value: int) -> Iterator[int]:
        """What a value is a view or a cast of."""
        producer = self.trace.producer(value)
        while producer is not None and packet(producer) in VIEWS | CASTS and producer.inputs:
            yield producer.inputs[0]
            producer = self.trace.producer(producer.inputs[0])

    def _holds_nothing_else(self, call: ModuleCall, nodes: frozenset[int] | range) -> bool:
        """Whether all else in a module works on each element alone, without tensors of its own."""
        inside = {v for n in call.nodes for v in self.trace.nodes[n].outputs}
        for index in call.nodes:
            node = self.trace.nodes[index]
            if index in nodes:
                continue
            if self._mixes(node) or packet(node) in FUSED or node.op is None:
                return False
            own = [v for v in node.inputs if v not in inside and self.trace.values[v].origin == "parameter"]
            if own and any(v in inside for v in node.inputs):
                return False
        return True

    def _mixes(self, node: Node) -> bool:
        """Whether a node is a map rather than a part of a statistic."""
        return packet(node) in MIXING and node.index not in self.products

    def _stops(self, node: Node) -> bool:
        """Whether what a node reads is no part of a norm that reads what it makes."""
        return self._mixes(node) or packet(node) in FUSED or node.index in self.claimed

    def _probe(self, node: Node, source: int, output: int) -> Match | None:
        trace = self.trace
        nodes = tuple(trace.slice([source], output))
        if node.index not in nodes or not self._closed(nodes, source):
            return None
        value = trace.values[source]
        replay = Replay(trace, source, output, nodes)
        alike = self._signature(nodes, source, output)
        if alike not in self._identified:
            example = torch.empty(value.shape, dtype=value.dtype, device="meta")
            self._identified[alike] = self._as_rounded(identify(replay, example), node, source)
        found = self._identified[alike]
        if found.spec is None and (
            found.statistic is None or is_lookalike(trace, source, output, self.consumers, self.depends_on_input)
        ):
            return None
        if self.depends_on_input(source):
            found = renamed(found, lambda name: replay.names.get(name))
        else:
            found = WEIGHT_NORMALIZATION
        return Match(found, NormCall((source,), output, frozenset(nodes)), source)

    def _as_rounded(self, found: Identification, node: Node, source: int) -> Identification:
        """With the rounding that a run in half precision shows, where this one was in float32."""
        spec, dtype = found.spec, self.trace.values[source].dtype
        if spec is None or self._alone or node.call < 0 or dtype in HALF or packet(node) in FUSED:
            return found
        half = in_half(self.trace.calls[node.call])
        lead = None if half is None else counterpart(self.trace, node.index, half)
        if half is None or lead is None:
            return found
        match = InlineNorms(half, set(), alone=True).match(lead)
        seen = None if match is None else match.identification
        if seen is None or seen.spec is None:
            return found
        rounded = spec.replace(
            rounding=seen.spec.rounding, gain_dtype=seen.spec.gain_dtype, output_dtype=seen.spec.output_dtype
        )
        if rounded != seen.spec:
            return found
        return replace(found, spec=rounded, reason=seen.reason, half_mismatch=seen.half_mismatch)

    def _signature(self, nodes: tuple[int, ...], source: int, output: int) -> str:
        """What two slices share that compute the same from tensors of the same shapes."""
        numbers: dict[int, int] = {}
        tensors: list[str] = []

        def number(value: int) -> int:
            if value not in numbers:
                numbers[value] = len(numbers)
                known = self.trace.values[value]
                leaf = self.trace.leaves.get(value)
                single = leaf is not None and leaf.numel() == 1 and not leaf.is_meta
                held = f"{leaf.item()!r}" if single and leaf is not None else ""
                origin = "" if value == source or known.origin == "node" else known.origin
                tensors.append(f"{origin}{known.shape}{known.dtype}{held}")
            return numbers[value]

        number(source)
        steps = []
        for index in nodes:
            node = self.trace.nodes[index]
            given = tree_map_only(Ref, lambda ref: f"v{number(ref.value)}", (node.args, node.kwargs))
            steps.append(f"{node.name}{given}{[number(v) for v in node.outputs]}")
        return "\n".join((*steps, str(number(output)), *tensors))

    def _endings(self, node: Node) -> list[int]:
        """Values as large as the statistic's source that are reached from it through a few elementwise operators.

        The farthest come first, so that a gain and a bias are taken in.
        """
        if packet(node) in FUSED:
            return self._fused_endings(node.outputs[0])
        largest = max((numel(self.trace, v) for v in node.inputs), default=0)
        found: list[int] = []
        reached: list[tuple[int, int]] = [(v, 0) for v in node.outputs]
        seen: set[int] = set()
        while reached:
            value, distance = reached.pop(0)
            if value in seen or distance > _LOOK_AHEAD:
                continue
            seen.add(value)
            for consumer in self.consumers.get(value, ()):
                after = self.trace.nodes[consumer]
                if self._mixes(after) or after.op is None:
                    continue
                for result in after.outputs:
                    if numel(self.trace, result) == largest and largest > 0 and packet(after) not in _BROADCASTS:
                        found.append(result)
                        if self._only_gained(result):
                            reached.append((result, distance + 1))
                        continue
                    reached.append((result, distance + 1))
        return sorted(set(found), reverse=True)[:6]

    def _fused_endings(self, value: int) -> list[int]:
        """A fused norm's output, and what it becomes by views, casts, a gain and a bias."""
        found = [value]
        for _ in range(_LOOK_AHEAD):
            users = self.consumers.get(found[-1], ())
            if len(users) != 1:
                break
            node = self.trace.nodes[users[0]]
            if not (packet(node) in ("view", "_unsafe_view") or self._only_gained(found[-1])):
                break
            if numel(self.trace, node.outputs[0]) != numel(self.trace, value):
                break
            found.append(node.outputs[0])
        return found[::-1]

    def _only_gained(self, value: int) -> bool:
        """Whether all that reads a value is a cast, or a product or sum with the model's own parameters."""
        users = self.consumers.get(value, ())
        if len(users) != 1 or value in self.trace.outputs:
            return False
        node = self.trace.nodes[users[0]]
        others = [v for v in node.inputs if v != value]
        return packet(node) in ADDS | CASTS and not any(self._dynamic[v] for v in others)

    def _sources(self, node: Node, shape: tuple[int, ...]) -> Iterator[int]:
        """Values of the output's shape that the statistic was formed of, nearest first, up to another norm's output."""
        todo, seen = list(node.inputs), set()
        candidates: list[int] = []
        for _ in range(_LOOK_AHEAD):
            ahead: list[int] = []
            for value in todo:
                if value in seen:
                    continue
                seen.add(value)
                if self.trace.values[value].shape == shape and self.trace.values[value].dtype.is_floating_point:
                    candidates.append(value)
                producer = self.trace.producer(value)
                if producer is None or self._stops(producer) or producer.index in self._ends:
                    continue
                ahead.extend(producer.inputs)
            todo = ahead
        yield from candidates[:6]

    def _closed(self, nodes: tuple[int, ...], source: int) -> bool:
        """Whether the slice needs nothing but its source, constants and the model's own tensors."""
        if len(nodes) > _LONGEST:
            return False
        inside = {v for n in nodes for v in self.trace.nodes[n].outputs}
        for index in nodes:
            node = self.trace.nodes[index]
            if self._mixes(node) or node.op is None:
                return False
            for value in node.inputs:
                if value != source and value not in inside and self.trace.values[value].origin in ("node", "input"):
                    return False
        return True
