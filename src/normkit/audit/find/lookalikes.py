"""What is divided by a sum or by the largest magnitude and is no norm: shares of a total, scores, quantization.

The arithmetic is that of an L1 or max-abs normalization; what comes before it and what follows tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from normkit.audit.find.operators import CASTS, MIXING, VIEWS, packet
from normkit.audit.trace.graph import Node, Trace

_POSITIVE = frozenset(
    ["_softmax", "sigmoid", "hardsigmoid", "relu", "exp", "softplus", "abs", "square", "clamp_min", "threshold"]
)
_CHOICES = frozenset(
    ["gather", "slice", "select", "index", "index_select", "topk", "sort", "masked_fill", "where", "scatter", "dropout",
     "native_dropout", "detach", "constant_pad_nd", "tril", "triu"]
)  # fmt: skip
_SCALES = frozenset(["mul", "div", "add", "sub", "neg"])
_ELEMENTWISE = VIEWS | CASTS | _CHOICES | _SCALES | frozenset(["clamp", "clamp_min", "clamp_max", "abs"])
_ROUNDS = frozenset(["round", "floor", "ceil", "trunc"])
_FAR = 10
"""How many operators are looked through."""


def is_lookalike(
    trace: Trace, source: int, output: int, readers: Mapping[int, Sequence[int]], dynamic: Callable[[int], bool]
) -> bool:
    """Whether a value divided by its l1 length or its largest magnitude makes weights, scores or a quantized tensor.

    Args:
        trace: the recorded run.
        source, output: the value that is divided, and the quotient.
        readers: the nodes that read each value.
        dynamic: whether a value depends on the model's inputs.
    """
    before = list(_makers(trace, source))
    if any(packet(node) in _POSITIVE for node in before):
        return True  # a share of a total: routing weights, attention without a softmax
    after = list(_takers(trace, output, readers))
    if any(quantizes(trace, node) for node in after):
        return True
    scores = any(_of_two_activations(node, dynamic) for node in before)
    return scores and any(_of_two_activations(node, dynamic) for node in after)


def quantizes(trace: Trace, node: Node) -> bool:
    """Whether a node rounds to whole numbers, or casts to whole numbers or to eight bits."""
    if packet(node).startswith("fake_quantize") or packet(node) in _ROUNDS:
        return True
    if packet(node) not in CASTS or not node.inputs:
        return False
    before, after = trace.values[node.inputs[0]].dtype, trace.values[node.outputs[0]].dtype
    return before.is_floating_point and before.itemsize > 1 and after.itemsize == 1 and str(after) != "torch.bool"


def _of_two_activations(node: Node, dynamic: Callable[[int], bool]) -> bool:
    return packet(node) in MIXING and sum(dynamic(v) for v in node.inputs) > 1


def _makers(trace: Trace, value: int) -> list[Node]:
    """The operators that made a value, as far as they only choose, scale or shift what they are given."""
    found: list[Node] = []
    todo, seen = [(value, 0)], set()
    while todo:
        value, steps = todo.pop()
        node = trace.producer(value)
        if node is None or node.index in seen or steps > _FAR:
            continue
        seen.add(node.index)
        found.append(node)
        if packet(node) in VIEWS | CASTS | _CHOICES | _SCALES and node.inputs:
            todo.append((node.inputs[0], steps + 1))
    return found


def _takers(trace: Trace, value: int, readers: Mapping[int, Sequence[int]]) -> list[Node]:
    """The operators that take a value, elementwise ones looked through."""
    found: list[Node] = []
    todo, seen = [(value, 0)], set()
    while todo:
        value, steps = todo.pop()
        for index in readers.get(value, ()):
            node = trace.nodes[index]
            if index in seen or steps > _FAR:
                continue
            seen.add(index)
            found.append(node)
            if packet(node) in _ELEMENTWISE:
                todo.extend((v, steps + 1) for v in node.outputs)
    return found
