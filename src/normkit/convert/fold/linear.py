"""Linear maps in a trace: matrix products and convolutions by a stored weight, and how to scale what goes in or out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.audit.find.operators import CASTS, VIEWS, packet
from normkit.audit.trace.graph import Node, Ref, ReplayError, Trace
from normkit.convert.fold.proof import Widened

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "linear": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Operator to the positions of its two factors."""
_CONVOLUTIONS = frozenset(["convolution", "_convolution"])


class Unfoldable(Exception):
    """Why something cannot be folded; shown to the user."""


@dataclass(frozen=True)
class Linear:
    """One linear map of activations by one parameter.

    Attributes:
        node: the operator.
        data: the value that it maps; ``data_dim`` is the dim of its features, ``out_dim`` that of the result's.
        weight: name of the parameter; ``leaf`` is its value.
        in_axis, out_axis: the axes of the parameter that run along what goes in and what comes out.
        groups, transposed: of a convolution.
        padded: what goes in is padded, so that a constant does not stay constant.
        bias: name of the bias parameter, or None; ``bias_leaf`` is its value.
        output: the value that holds the result, bias included.
        module: the module that it runs in.
    """

    node: int
    data: int
    data_dim: int
    out_dim: int
    weight: str
    leaf: int
    in_axis: int
    out_axis: int
    groups: int
    transposed: bool
    padded: bool
    bias: str | None
    bias_leaf: int | None
    output: int
    module: str

    @property
    def convolution(self) -> bool:
        """Whether the weight is a convolution's: (out, in / groups, ...), or (in, out / groups, ...) transposed."""
        return self.groups > 0


def scale_in(weight: Tensor, scale: Tensor, linear: Linear) -> Tensor:
    """The weight that does to x what ``weight`` does to ``scale * x``."""
    if not linear.convolution or linear.transposed:
        return weight * along(scale, weight.dim(), linear.in_axis)
    out, each, *kernel = weight.shape
    cut = weight.reshape(linear.groups, out // linear.groups, each, *kernel)
    return (cut * scale.view(linear.groups, 1, each, *[1] * len(kernel))).reshape(weight.shape)


def scale_out(weight: Tensor, scale: Tensor, linear: Linear) -> Tensor:
    """The weight whose result is ``scale`` times that of ``weight``."""
    if not linear.convolution or not linear.transposed:
        return weight * along(scale, weight.dim(), linear.out_axis)
    fed, each, *kernel = weight.shape  # a transposed convolution's output channels are cut into groups on axis 1
    cut = weight.reshape(linear.groups, fed // linear.groups, each, *kernel)
    return (cut * scale.view(linear.groups, 1, each, *[1] * len(kernel))).reshape(weight.shape)


def respond(weight: Tensor, constant: Tensor, linear: Linear) -> Tensor:
    """What the map makes of one vector that is the same at every position.

    Raises:
        Unfoldable: it is not the same at every position of the result.
    """
    if not linear.convolution:
        return torch.tensordot(weight.movedim(linear.in_axis, -1), constant, dims=1)
    taps = weight.flatten(2)
    if linear.padded:
        raise Unfoldable(f"{linear.module} pads with zeros, so a shift is not the same at its borders")
    if linear.transposed and taps.shape[2] > 1:
        raise Unfoldable(f"{linear.module} is transposed: a shift is not the same at all its outputs")
    if linear.transposed:
        cut = weight.reshape(linear.groups, -1, weight.shape[1])
        return torch.einsum("gio,gi->go", cut, constant.view(linear.groups, -1)).reshape(-1)
    cut = taps.sum(-1).reshape(linear.groups, -1, weight.shape[1])
    return torch.einsum("goi,gi->go", cut, constant.view(linear.groups, -1)).reshape(-1)


def along(vector: Tensor, ndim: int, dim: int) -> Tensor:
    """A vector as a tensor that broadcasts along one dim."""
    return vector.reshape([-1 if d == dim % ndim else 1 for d in range(ndim)])


class Graph:
    """Who reads what in a trace of the float64 copy, and its linear maps."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.consumers: dict[int, list[int]] = {}
        self._dynamic = bytearray(len(trace.values))
        for value in trace.inputs:
            self._dynamic[value] = 1
        for node in trace.nodes:
            for value in dict.fromkeys(node.inputs):
                self.consumers.setdefault(value, []).append(node.index)
            if any(self._dynamic[v] for v in node.inputs):
                for value in node.outputs:
                    self._dynamic[value] = 1
        self._linear: dict[int, Linear | None] = {}

    def dynamic(self, value: int) -> bool:
        """Whether a value depends on the model's inputs."""
        return bool(self._dynamic[value])

    def readers(self, value: int) -> list[Node]:
        """The nodes that read a value."""
        return [self.trace.nodes[n] for n in self.consumers.get(value, ())]

    def where(self, node: Node) -> str:
        """An operator and its module, in words."""
        name = self.trace.calls[node.call].name if node.call >= 0 else ""
        return f"{packet(node) or 'an in-place write'} in {name or 'the model'}"

    def linear(self, index: int) -> Linear | None:
        """The linear map that a node is, or None."""
        if index not in self._linear:
            node = self.trace.nodes[index]
            self._linear[index] = self._convolution(node) if packet(node) in _CONVOLUTIONS else self._product(node)
        return self._linear[index]

    def uses(self, leaf: int) -> set[int]:
        """The nodes at which a parameter, or what is computed of it alone, meets activations (or is returned: -1)."""
        found: set[int] = set()
        todo, seen = [leaf], set()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.trace.outputs:
                found.add(-1)
            for node in self.readers(value):
                if any(self._dynamic[v] for v in node.outputs):
                    found.add(node.index)
                else:
                    todo.extend(node.outputs)
        return found

    def replay(self, nodes: Sequence[int], feeds: dict[int, Tensor], output: int) -> Tensor:
        """Run some nodes again in float64.

        Raises:
            ReplayError: a value is needed that is not fed.
        """
        with Widened():
            return self.trace.replay(nodes, feeds)[output]

    # ---- what a node is ----

    def _product(self, node: Node) -> Linear | None:
        places = _PRODUCTS.get(packet(node))
        if places is None or node.kwargs:
            return None
        factors = [node.args[p] for p in places]
        if not all(isinstance(f, Ref) for f in factors):
            return None
        first, second = (f.value for f in factors)
        if self.dynamic(first) == self.dynamic(second):
            return None
        data, matrix = (first, second) if self.dynamic(first) else (second, first)
        transposed_weight = packet(node) == "linear"
        ends = (-2, -1) if matrix == second else (-1, -2)  # which dims of the matrix run along in and out
        leaf = self._leaf(matrix)
        axes = None if leaf is None else self._axes(leaf, matrix, ends[::-1] if transposed_weight else ends)
        if leaf is None or axes is None:
            return None
        dim = -1 if matrix == second else -2
        given = node.args[0] if packet(node) in ("addmm", "baddbmm") else None
        if packet(node) == "linear" and len(node.args) > 2:
            given = node.args[2]
        bias = self._leaf(given.value) if isinstance(given, Ref) else None
        if isinstance(given, Ref) and bias is None:
            return None
        output = node.outputs[0]
        if given is None:
            bias, output = self._added(output, dim)
        return self._made(node, data, (dim, dim), leaf, axes, 0, False, False, bias, output)

    def _convolution(self, node: Node) -> Linear | None:
        data, weight, bias = node.args[:3]
        padding, transposed, groups = node.args[4], bool(node.args[6]), int(node.args[8])
        if not isinstance(weight, Ref) or not self.dynamic(data.value) or self.dynamic(weight.value):
            return None
        leaf = self._leaf(weight.value)
        if leaf is None or self.trace.values[leaf].shape != self.trace.values[weight.value].shape:
            return None
        held = self._leaf(bias.value) if isinstance(bias, Ref) else None
        if isinstance(bias, Ref) and held is None:
            return None
        dim = 1 - len(self.trace.values[weight.value].shape)
        axes = (0, 1) if transposed else (1, 0)
        output = node.outputs[0]
        return self._made(
            node, data.value, (dim, dim), leaf, axes, groups, transposed, any(padding), held, output
        )  # fmt: skip

    def _made(
        self,
        node: Node,
        data: int,
        dims: tuple[int, int],
        leaf: int,
        axes: tuple[int, int],
        groups: int,
        transposed: bool,
        padded: bool,
        bias: int | None,
        output: int,
    ) -> Linear:
        values = self.trace.values
        return Linear(
            node=node.index,
            data=data,
            data_dim=dims[0],
            out_dim=dims[1],
            weight=values[leaf].name,
            leaf=leaf,
            in_axis=axes[0],
            out_axis=axes[1],
            groups=groups,
            transposed=transposed,
            padded=padded,
            bias=None if bias is None else values[bias].name,
            bias_leaf=bias,
            output=output,
            module=self.trace.calls[node.call].name if node.call >= 0 else "",
        )

    def _leaf(self, value: int) -> int | None:
        """The one parameter that a value is a view or a cast of."""
        for _ in range(16):
            found = self.trace.values[value]
            if found.origin == "parameter":
                return value
            producer = self.trace.producer(value)
            if producer is None or packet(producer) not in _RESHAPES or len(producer.inputs) != 1:
                return None
            value = producer.inputs[0]
        return None

    def _axes(self, leaf: int, matrix: int, ends: tuple[int, int]) -> tuple[int, int] | None:
        """The axes of a parameter that run along two dims of the matrix made of it, by scaling each in turn."""
        shape, made = self.trace.values[leaf].shape, self.trace.values[matrix].shape
        nodes = self.trace.slice([leaf], matrix)
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(shape, generator=generator, dtype=torch.float64)
        found = []
        for end in ends:
            scale = 0.5 + torch.rand(made[end], generator=generator, dtype=torch.float64)
            wanted = self.replay(nodes, {leaf: base}, matrix) * along(scale, len(made), end)
            fits = (
                axis
                for axis in range(len(shape))
                if shape[axis] == made[end]
                and torch.equal(self.replay(nodes, {leaf: base * along(scale, len(shape), axis)}, matrix), wanted)
            )
            found.append(next(fits, None))
        first, second = found
        if first is None:
            return None
        return first, -1 if second is None else second

    def _added(self, value: int, dim: int) -> tuple[int | None, int]:
        """The bias that is added to a product in an operator of its own, and the sum."""
        size = self.trace.values[value].shape[dim]
        current = value
        for _ in range(4):
            readers = self.readers(current)
            if len(readers) != 1 or current in self.trace.outputs:
                break
            node = readers[0]
            if packet(node) in ("add", "add_") and len(node.inputs) == 2 and not node.kwargs:
                other = next((v for v in node.inputs if v != current), current)
                leaf = self._leaf(other)
                if leaf is not None and self.trace.values[other].shape == (size,) and dim == -1:
                    return leaf, node.outputs[0]
                break
            if packet(node) not in VIEWS or self.trace.values[node.outputs[0]].shape[-1] != size:
                break
            current = node.outputs[0]
        return None, value


_RESHAPES = VIEWS | CASTS | {"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "detach", "expand"}

__all__ = ["Graph", "Linear", "ReplayError", "Unfoldable", "along", "respond", "scale_in", "scale_out"]
