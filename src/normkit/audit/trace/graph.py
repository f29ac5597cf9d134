"""What one run of a model left behind: values, operators, module calls.

Everything here is plain data. A `Trace` holds no activation: a value is a number with a shape, and only leaves
(parameters, buffers, constants) can be turned back into tensors. That keeps an audit of a large real model at the
memory of the model itself, and still lets any slice of operators be replayed with other inputs (`Trace.replay`),
which is how a norm written inline is identified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Origin = Literal["node", "input", "parameter", "buffer", "constant"]


class ReplayError(RuntimeError):
    """A slice of operators cannot be run again: it needs a value that was neither fed nor computed in it."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor's place in an argument template: the index of its value in `Trace.values`."""

    value: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor argument of a module call: its value, and enough to build another tensor of the same layout."""

    value: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that is neither a tensor nor plain data; only its type is kept (it may hold activations)."""

    type_name: str


@dataclass(slots=True)
class Value:
    """One tensor value. A tensor that is written in place has one value before and another after."""

    index: int
    origin: Origin
    producer: int  # node index; -1 for a leaf
    position: int  # which output of the producer
    name: str  # qualified name of a parameter or buffer, position of an input, else ""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Node:
    """One operator call.

    ``op`` is None for an *overlay*: a tensor read after part of its memory was written through another view. Its
    inputs are the older value and the values written over it, in order.
    """

    index: int
    op: torch._ops.OpOverload | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]  # value indices in argument order
    outputs: tuple[int, ...]  # value indices: returned tensors, then tensors that were written without being returned
    call: int  # index of the innermost module call, -1 outside any
    line: tuple[str, int] | None = None  # the model's source line that ran it: file and line number

    @property
    def name(self) -> str:
        """``aten.add.Tensor``-like name, for reports and tests."""
        return str(self.op) if self.op is not None else "overlay"


@dataclass(slots=True)
class ModuleCall:
    """One call of one module: which nodes ran inside it and which values went in and out."""

    index: int
    name: str
    module: nn.Module
    parent: int
    order: int  # 0 for the first call of this module, 1 for the second, ...
    first: int  # first node index inside
    last: int = -1  # one past the last node index
    args: tuple[Any, ...] = ()  # templates: tensors are TensorInfo
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    failed: bool = False

    @property
    def nodes(self) -> range:
        """The indices of the nodes that ran inside (submodules included)."""
        return range(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Guess:
    """A number or shape that meta tensors cannot know and that was assumed so that the run could go on."""

    op: str
    module: str
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A module that raised, and what it raised."""

    module: str
    error: BaseException


@dataclass
class Trace:
    """The recorded dataflow of one run."""

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    leaves: dict[int, Tensor] = field(default_factory=dict)  # value index -> the model's own tensor, or a constant
    guesses: list[Guess] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    error: BaseException | None = None

    def calls_of(self, name: str) -> list[ModuleCall]:
        """Every call of the module with this (first) qualified name, in order."""
        return [call for call in self.calls if call.name == name]

    def producer(self, value: int) -> Node | None:
        """The node that made a value, or None for a leaf."""
        index = self.values[value].producer
        return self.nodes[index] if index >= 0 else None

    def slice(self, inputs: Iterable[int], output: int) -> list[int]:
        """The nodes that lie between the given values and ``output``: what must be replayed to get it."""
        stop = set(inputs)
        seen: set[int] = set()
        todo = [output]
        while todo:
            value = todo.pop()
            producer = self.values[value].producer
            if value in stop or producer < 0 or producer in seen:
                continue
            seen.add(producer)
            todo.extend(self.nodes[producer].inputs)
        return sorted(seen)

    def replay(
        self,
        nodes: Iterable[int],
        feeds: Mapping[int, Tensor],
        *,
        device: torch.device | str = "cpu",
        training: bool | None = None,
        casts: Mapping[torch.dtype, torch.dtype] | None = None,
    ) -> dict[int, Tensor]:
        """Run some nodes again with other tensors.

        Args:
            nodes: node indices; run in ascending order.
            feeds: value index -> tensor to use in its place (inputs, and any leaf to be replaced).
            device: where to run: leaves are moved there, and a factory's own device is replaced by it.
            training: whether batch norms with running statistics use the batch's instead; None as recorded.
            casts: dtypes to use in place of recorded ones.

        Returns:
            Every value that was fed or computed. What was written in place is written on a copy.

        Raises:
            ReplayError: a value is needed that is not fed, not computed and not a leaf with data.
        """
        known = dict(feeds)
        target = torch.device(device)

        def fetch(value: int) -> Tensor:
            if value not in known:
                leaf = self.leaves.get(value)
                if leaf is None or leaf.is_meta or is_freed(leaf):
                    raise ReplayError(f"value {value} ({self.values[value].origin}) is not available to the replay")
                known[value] = leaf.detach().to(target)
            return known[value]

        with torch.no_grad():
            for index in sorted(set(nodes)):
                node = self.nodes[index]
                if node.op is None:
                    raise ReplayError("the slice holds a partial in-place write, which is not replayed")
                written = written_arguments(node.op)
                args = list(node.args)
                kwargs = dict(node.kwargs)
                for place in written:
                    holder: Any = args if isinstance(place, int) else kwargs
                    if _given(args, kwargs, place):
                        holder[place] = tree_map_only(Ref, lambda ref: fetch(ref.value).clone(), holder[place])
                args = tree_map_only(Ref, lambda ref: fetch(ref.value), args)
                kwargs = tree_map_only(Ref, lambda ref: fetch(ref.value), kwargs)
                args = tree_map_only(torch.device, lambda _: target, args)
                kwargs = tree_map_only(torch.device, lambda _: target, kwargs)
                if casts:
                    args = tree_map_only(torch.dtype, lambda dtype: casts.get(dtype, dtype), args)
                    kwargs = tree_map_only(torch.dtype, lambda dtype: casts.get(dtype, dtype), kwargs)
                if training is not None and holds_running_statistics(node):
                    args[BATCH_MODE] = training
                result = node.op(*args, **kwargs)
                made = flat_tensors(result)
                for place in written:
                    holder = args if isinstance(place, int) else kwargs
                    if _given(args, kwargs, place):
                        made += [t for t in flat_tensors(holder[place]) if all(t is not other for other in made)]
                known.update(zip(node.outputs, made, strict=False))
        return known


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's memory was given back, as sharded training does between the uses of a parameter."""
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except (NotImplementedError, RuntimeError):  # it has no storage of its own
        return False


def _given(args: list[Any], kwargs: dict[str, Any], place: int | str) -> bool:
    return place < len(args) if isinstance(place, int) else place in kwargs


_BATCH_NORMS = frozenset(["native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"])
BATCH_MODE = 5
"""The argument of a batch norm that says whether the batch's statistics are used; two stored ones come before it."""


def holds_running_statistics(node: Node) -> bool:
    """Whether a node is a batch norm with running statistics, whose mode is its module's."""
    if node.op is None or node.op.overloadpacket.__name__ not in _BATCH_NORMS:
        return False
    return len(node.args) > BATCH_MODE and None not in node.args[BATCH_MODE - 2 : BATCH_MODE]


_WRITTEN: dict[torch._ops.OpOverload, tuple[int | str, ...]] = {}


def written_arguments(op: torch._ops.OpOverload) -> tuple[int | str, ...]:
    """The arguments that an operator writes to: positions, or names of keyword-only ones."""
    found = _WRITTEN.get(op)
    if found is None:
        found = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        _WRITTEN[op] = found
    return found


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in what an operator takes or returns: a tensor, or (nested) lists and tuples of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return []
