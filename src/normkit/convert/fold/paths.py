"""Paths in a trace between a norm and the linear maps around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.audit.find.operators import packet
from normkit.audit.trace.graph import Node, ReplayError
from normkit.convert.fold.linear import Graph, Linear, Unfoldable, along

_TOLERANCE = 1e-13
_LONGEST = 12


@dataclass(frozen=True)
class Path:
    """A linear map and the nodes between it and a norm."""

    linear: Linear
    nodes: tuple[int, ...]
    source: int


def following(graph: Graph, value: int) -> list[Path]:
    """The linear maps that read a value; nothing else may read it, or what is made of it on the way.

    Raises:
        Unfoldable: something else does; the message says what.
    """
    found: list[Path] = []
    todo: list[tuple[int, tuple[int, ...]]] = [(value, ())]
    while todo:
        current, nodes = todo.pop(0)
        if current in graph.trace.outputs:
            raise Unfoldable("the model returns its output")
        if len(nodes) > _LONGEST:
            raise Unfoldable("no linear map follows nearby")
        readers = graph.readers(current)
        for node in readers:
            linear = graph.linear(node.index)
            if linear is not None and linear.data == current:
                found.append(Path(linear, nodes, value))
                continue
            _check_reader(graph, node, current)
            todo.extend((output, (*nodes, node.index)) for output in node.outputs)
    if not found:
        raise Unfoldable("no linear map reads its output")
    return found


def _check_reader(graph: Graph, node: Node, value: int) -> None:
    others = [v for v in dict.fromkeys(node.inputs) if v != value and graph.dynamic(v)]
    if not others and node.op is not None and packet(node) not in _PRODUCT_LIKE:
        return  # whether it keeps features apart is measured
    where = graph.where(node)
    if packet(node) in ("add", "sub", "lerp") and others:
        raise Unfoldable(f"its output is added to another activation ({where}): it lies on the residual stream")
    if packet(node) in ("index", "gather", "index_select") and others:
        raise Unfoldable(f"its output is routed by data ({where}): what this run did not reach is not seen")
    raise Unfoldable(f"its output is read by {where}, which is no linear map of it by a stored weight")


_PRODUCT_LIKE = frozenset(["mm", "bmm", "addmm", "baddbmm", "convolution", "linear"])


def preceding(graph: Graph, value: int) -> Path:
    """The linear map whose result a value is, read by nothing else on the way.

    Raises:
        Unfoldable: there is none.
    """
    by_output = {m.output: m for n in graph.trace.nodes if (m := graph.linear(n.index)) is not None}
    nodes: list[int] = []
    current = value
    for _ in range(_LONGEST):
        if current in graph.trace.outputs or len(graph.readers(current)) != 1:
            raise Unfoldable("what it normalizes is read elsewhere too")
        if current in by_output:
            return Path(by_output[current], tuple(reversed(nodes)), current)
        producer = graph.trace.producer(current)
        inputs = [] if producer is None else [v for v in dict.fromkeys(producer.inputs) if graph.dynamic(v)]
        if producer is None or len(inputs) != 1 or producer.op is None:
            raise Unfoldable("no linear map comes right before it")
        nodes.append(producer.index)
        current = inputs[0]
    raise Unfoldable("no linear map comes right before it")


def check_path(graph: Graph, path: Path, start: tuple[int, int], end: tuple[int, int], *, shifted: bool) -> None:
    """See by replay that a path keeps features apart: f(s * x + t) = s * f(x) + t along the features.

    Args:
        graph: the trace.
        path: what lies between.
        start, end: (value, its first feature dim, counted from the end) at both ends; features of several dims at the
            start are flattened at the end.
        shifted: whether a shift must pass unchanged too.

    Raises:
        Unfoldable: it does not.
    """
    if not path.nodes:
        if start[0] != end[0] or start[1] != end[1]:
            raise Unfoldable("the linear map runs along another dim than the norm's features")
        return
    (first, dim), (last, last_dim) = start, end
    shape = graph.trace.values[first].shape
    size = graph.trace.values[last].shape[last_dim]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    scale = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
    scale *= torch.where(torch.rand(size, generator=generator) < 0.5, -1.0, 1.0)
    shift = torch.randn(size, generator=generator, dtype=torch.float64) if shifted else torch.zeros(size).double()
    nearby = ", ".join(dict.fromkeys(graph.where(graph.trace.nodes[n]) for n in path.nodes))
    try:
        moved = x * _spread(scale, shape, dim) + _spread(shift, shape, dim)
        got = graph.replay(path.nodes, {first: moved}, last)
        plain = graph.replay(path.nodes, {first: x}, last)
    except (ReplayError, RuntimeError) as error:
        raise Unfoldable(f"what lies before the linear map ({nearby}) cannot be run alone") from error
    wanted = plain * along(scale, plain.dim(), last_dim) + along(shift, plain.dim(), last_dim)
    if not torch.allclose(got, wanted, rtol=_TOLERANCE, atol=_TOLERANCE * float(wanted.abs().max())):
        raise Unfoldable(f"what lies before the linear map ({nearby}) does not keep the features apart, or bends them")


def _spread(vector: Tensor, shape: tuple[int, ...], dim: int) -> Tensor:
    """Features over one dim, or over the trailing ones from ``dim`` on."""
    if shape[dim] == vector.numel():
        return along(vector, len(shape), dim)
    trailing = shape[dim:]
    if torch.Size(trailing).numel() != vector.numel():
        raise Unfoldable("the linear map reads another number of features than the norm has")
    return vector.reshape(trailing)
