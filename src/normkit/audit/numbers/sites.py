"""Where a run is looked at: the inputs and outputs of norms, the residual adds, the products that a softmax takes.

Found once in the audit's trace; `normkit.audit.trace.watch` finds them again in later runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from normkit.audit.find import Occurrence
from normkit.audit.find.operators import CASTS, MIXING, VIEWS, packet
from normkit.audit.place import Branch
from normkit.audit.trace.graph import Node, Trace
from normkit.audit.trace.watch import Finder, Point, Spot

_ATTENTION = ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_efficient_attention")
_CARRY = CASTS | VIEWS | {"slice", "select", "index", "repeat", "neg", "cat", "add", "mul", "sub", "detach", "split"}
_SHIFTS = frozenset(["add", "sub", "where", "masked_fill", "tanh", "clamp", "index_put", "minimum"])
_DEEPEST = 60


@dataclass(frozen=True)
class NormSites:
    """One norm: the values that it normalizes and gives, a pair for each call."""

    name: str
    calls: tuple[tuple[Point | None, Point | None], ...]


@dataclass(frozen=True)
class BranchSite:
    """A residual add: which of its tensor inputs is the stream, which the branch."""

    spot: Spot
    identity: int
    addend: int


@dataclass(frozen=True)
class AttentionSite:
    """An attention: a fused operator (``spot``), or the value that are its products of queries and keys."""

    name: str
    qk_norm: bool
    spot: Spot | None = None
    logits: Point | None = None


@dataclass(frozen=True)
class Sites:
    """Everything of a model that is measured."""

    norms: tuple[NormSites, ...]
    branches: tuple[BranchSite | None, ...]
    """One for each branch of the audit; None where its add is no operator of the run."""
    attentions: tuple[AttentionSite, ...]


def find_sites(trace: Trace, occurrences: Sequence[Occurrence], branches: Sequence[Branch]) -> Sites:
    """The sites of an audit's trace."""
    finder = Finder(trace)
    norms = tuple(
        NormSites(o.name, tuple((finder.point(c.inputs[0]), finder.point(c.output)) for c in o.calls if c.inputs))
        for o in occurrences
    )
    outputs = {c.output for o in occurrences for c in o.calls}
    adds = tuple(_branch(finder, trace, branch) for branch in branches)
    return Sites(norms, adds, tuple(_attentions(finder, trace, outputs)))


def _branch(finder: Finder, trace: Trace, branch: Branch) -> BranchSite | None:
    node = trace.nodes[branch.node]
    if node.op is None or branch.identity not in node.inputs or branch.addend not in node.inputs:
        return None
    identity, addend = node.inputs.index(branch.identity), node.inputs.index(branch.addend)
    return BranchSite(finder.spot(node), identity, addend)


def _attentions(finder: Finder, trace: Trace, norm_outputs: set[int]) -> Iterator[AttentionSite]:
    for node in trace.nodes:
        name = packet(node)
        if name.startswith(_ATTENTION):
            normed = any(_reaches(trace, v, norm_outputs) for v in node.inputs[:2])
            yield AttentionSite(_module(trace, node), normed, spot=finder.spot(node))
        elif name in ("_softmax", "_safe_softmax", "softmax"):
            found = _products(trace, node.inputs[0])
            if found is None:
                continue
            logits, product = found
            normed = any(_reaches(trace, v, norm_outputs) for v in product.inputs)
            yield AttentionSite(_module(trace, node), normed, logits=finder.point(logits))


def _module(trace: Trace, node: Node) -> str:
    return trace.calls[node.call].name if node.call >= 0 else ""


def _products(trace: Trace, value: int) -> tuple[int, Node] | None:
    """The scaled products of two activations behind a softmax's input, and the operator that formed them.

    What is added to them (a mask, a position bias) and a soft cap, ``tanh(x / cap) * cap``, comes after; what scales
    them is kept.
    """
    logits, capped = value, False
    for _ in range(_DEEPEST):
        node = trace.producer(value)
        if node is None or node.op is None:
            return None
        name = packet(node)
        if name in ("bmm", "matmul", "baddbmm", "einsum"):
            return logits, node
        if name in MIXING:
            return None
        value = _largest(trace, node)
        if name in _SHIFTS or (capped and name in ("mul", "div")):
            logits, capped = value, name == "tanh"
    return None


def _largest(trace: Trace, node: Node) -> int:
    """The input that the operator carries on: of several, the floating-point one that a product of activations made."""
    floats = [v for v in node.inputs if trace.values[v].dtype.is_floating_point] or list(node.inputs)
    made = [v for v in floats if trace.values[v].producer >= 0]
    return next((v for v in made if _from_product(trace, v)), (made or floats)[0])


def _from_product(trace: Trace, value: int) -> bool:
    for _ in range(12):
        node = trace.producer(value)
        if node is None or not node.inputs:
            return False
        if packet(node) in MIXING:
            return packet(node) in ("bmm", "matmul", "baddbmm", "einsum")
        value = node.inputs[0]
    return False


def _reaches(trace: Trace, value: int, targets: set[int]) -> bool:
    """Whether a value is a norm's output, moved, rotated or scaled."""
    todo, seen = [value], set()
    while todo and len(seen) < 4 * _DEEPEST:
        current = todo.pop()
        if current in targets:
            return True
        node = trace.producer(current)
        if current in seen or node is None or (packet(node) not in _CARRY and node.op is not None):
            continue
        seen.add(current)
        todo.extend(node.inputs)
    return False
