"""Looking at tensors while a model runs again.

A `Trace` holds no activation. To measure some, the model is run once more, and each operator of interest is found
again by where it runs: the module call, its name, and how many of that name ran in that call before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.audit.trace.graph import ModuleCall, Node, Trace, flat_tensors


@dataclass(frozen=True, slots=True)
class Spot:
    """An operator of a run, in words that fit another run of the same model."""

    module: str
    order: int  # which call of the module
    op: str
    number: int  # which of the operators of that name in that call


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a run: an output of an operator, or an input of the first one to read it (where none made it)."""

    spot: Spot
    is_output: bool
    position: int


@dataclass(slots=True)
class Seen:
    """The tensors of one operator as it runs."""

    spot: Spot
    op: torch._ops.OpOverload
    inputs: list[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Look = Callable[[Tensor], None]
Examine = Callable[[Seen, "list[Tensor]"], None]


class Watch:
    """Callbacks for the values and operators of a run that are to be looked at.

    A callback must not keep the tensor: what follows may write to it.
    """

    def __init__(self) -> None:
        self._before: dict[Spot, list[tuple[int, Look]]] = {}
        self._after: dict[Spot, list[tuple[int, Look]]] = {}
        self._whole: dict[Spot, list[Examine]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self.missed: set[Spot] = set()

    def value(self, point: Point, look: Look) -> None:
        """Call ``look`` with a value."""
        table = self._after if point.is_output else self._before
        table.setdefault(point.spot, []).append((point.position, look))
        self.missed.add(point.spot)

    def operator(self, spot: Spot, examine: Examine) -> None:
        """Call ``examine`` with the arguments and the results of an operator."""
        self._whole.setdefault(spot, []).append(examine)
        self.missed.add(spot)

    def before(
        self, func: torch._ops.OpOverload, call: ModuleCall | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Seen | None:
        """The run is about to execute an operator."""
        name = str(func)
        index = -1 if call is None else call.index
        number = self._counts[index, name] = self._counts.get((index, name), -1) + 1
        spot = Spot("" if call is None else call.name, 0 if call is None else call.order, name, number)
        if spot not in self._before and spot not in self._after and spot not in self._whole:
            return None
        inputs = flat_tensors([*args, *kwargs.values()])
        self.missed.discard(spot)
        for position, look in self._before.get(spot, ()):
            look(inputs[position])
        if func._schema.is_mutable and spot in self._whole:
            inputs = [t.clone() for t in inputs]
        return Seen(spot, func, inputs, args, kwargs)

    def after(self, seen: Seen, outputs: list[Tensor]) -> None:
        """The operator has run."""
        for position, look in self._after.get(seen.spot, ()):
            look(outputs[position])
        for examine in self._whole.get(seen.spot, ()):
            examine(seen, outputs)


class Finder:
    """The spots and points of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._spots: dict[int, Spot] = {}
        self._readers: dict[int, tuple[int, int]] = {}
        counts: dict[tuple[int, str], int] = {}
        for node in trace.nodes:
            if node.op is None:
                continue
            number = counts[node.call, node.name] = counts.get((node.call, node.name), -1) + 1
            call = trace.calls[node.call] if node.call >= 0 else None
            module, order = ("", 0) if call is None else (call.name, call.order)
            self._spots[node.index] = Spot(module, order, node.name, number)
            for position, value in enumerate(node.inputs):
                self._readers.setdefault(value, (node.index, position))

    def spot(self, node: Node | int) -> Spot:
        """Where an operator runs."""
        return self._spots[node if isinstance(node, int) else node.index]

    def point(self, value: int) -> Point | None:
        """Where a value can be looked at; None where no operator makes or reads it."""
        known = self.trace.values[value]
        if known.producer in self._spots:
            return Point(self._spots[known.producer], True, known.position)
        if value not in self._readers:
            return None
        node, position = self._readers[value]
        return Point(self._spots[node], False, position)
