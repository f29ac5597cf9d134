"""What running a model, or one of its norms, again tells: values at its norms, padding, batch mates, half precision.

Every run is made when a rule first asks for it, leaves the model as it was, and is given up quietly where the model
cannot be run that way: a rule then has nothing to go by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from normkit.audit.features import Dims, followed
from normkit.audit.find import Occurrence
from normkit.audit.find.inline import Replay
from normkit.audit.find.modules import example_of
from normkit.audit.find.operators import ADDS, CASTS, VIEWS, packet
from normkit.audit.identify.probe import Probe, has_values, private_copy, undisturbed
from normkit.audit.trace import trace
from normkit.audit.trace.graph import Trace
from normkit.audit.trace.watch import Finder, Watch
from normkit.reference import statistics
from normkit.spec import NormSpec

_CARRIES = VIEWS | CASTS | {"slice", "select", "native_dropout", "detach", "contiguous"}
_PADDED_SHARE = 4
"""One position in so many is taken for padding."""


@dataclass(frozen=True)
class InputValues:
    """What entered a norm in the audited run."""

    largest: float
    finite: bool
    kept: float | None
    """The typical root of the statistic over the norm's divisor: 1 where eps is invisible, 0 where it is everything.
    None where it cannot be told."""
    mean_square: float | None


@dataclass(frozen=True)
class HalfRange:
    """A norm in its own half precision against itself in float32, at inputs of one size."""

    overflows_from: float | None
    underflows_below: float | None
    zeros_give_nan: bool


class Reruns:
    """See the module's docstring.

    Args:
        model, args, kwargs: what was audited.
        recorded: the trace of that run.
        occurrences: the norms found in it.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recorded: Trace,
        occurrences: Sequence[Occurrence],
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.recorded = recorded
        self.occurrences = {o.name: o for o in occurrences}
        self._finder = Finder(recorded)
        self._half: dict[str, HalfRange | None] = {}

    @cached_property
    def real(self) -> bool:
        """Whether there are numbers at all."""
        given = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]
        return all(has_values(t) for t in (*self.model.parameters(), *self.model.buffers(), *given))

    # ---- values in the audited run ----

    @cached_property
    def inputs(self) -> dict[str, InputValues]:
        """What entered each norm; norms whose input could not be looked at are left out."""
        found: dict[str, list[InputValues]] = {}
        if not self.real:
            return {}

        def looker(name: str, spec: NormSpec | None) -> Callable[[Tensor], None]:
            return lambda x: found.setdefault(name, []).append(_values(x, spec))

        watch = Watch()
        for name, occurrence in self.occurrences.items():
            for call in occurrence.calls:
                point = self._finder.point(call.inputs[0])
                if point is not None:
                    watch.value(point, looker(name, occurrence.identification.spec))
        self._run(self.args, self.kwargs, watch)
        return {name: _together(values) for name, values in found.items()}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch) -> bool:
        return trace(self.model, args, kwargs, watch).error is None

    # ---- batch mates and padding ----

    @cached_property
    def mates(self) -> tuple[str, ...]:
        """Norms that give the first sample another output when other samples stand beside it."""
        batch = self._batch_size()
        if not self.real or batch < 2:
            return ()

        def alone(x: Tensor) -> Tensor:
            return x[:1].expand_as(x).clone() if x.dim() > 0 and x.shape[0] == batch else x

        args, kwargs = tree_map_only(Tensor, alone, (self.args, self.kwargs))
        same = all(torch.equal(a, b) for a, b in zip(tree_leaves((self.args, self.kwargs)), tree_leaves((args, kwargs)),
                                                     strict=True) if isinstance(a, Tensor))  # fmt: skip
        if same:
            return ()
        first = lambda x: x[0] if x.dim() > 1 and x.shape[0] == batch else None  # noqa: E731
        return self._spreading((args, kwargs), (self.args, self.kwargs), first)

    def _batch_size(self) -> int:
        """The first size of the inputs, if all tensors with a few dims agree on it."""
        sizes = {t.shape[0] for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor) and t.dim() > 1}
        return sizes.pop() if len(sizes) == 1 else 0

    @cached_property
    def padding(self) -> tuple[str, ...]:
        """Norms that give a valid position another output when the padding holds something else.

        Only looked for where exactly one of the inputs can be a mask (`_masks`). Its more frequent value stands for
        what is valid.
        """
        tensors, layout = tree_flatten((self.args, self.kwargs))
        masks = self._masks(tensors) if self.real else []
        if len(masks) != 1:
            return ()
        mask = tensors[masks[0]]
        length = mask.shape[1]
        padded = max(1, length // _PADDED_SHARE)
        shape = tuple(mask.shape)
        usual = int(2 * mask.sum() >= mask.numel())
        masked = mask.clone()
        masked[:, -padded:] = 1 - usual
        valid = masked == usual

        def other(x: Tensor) -> Tensor:
            if tuple(x.shape[:2]) == shape:
                return _elsewhere(x, valid.reshape(*shape, *[1] * (x.dim() - 2)))
            if x.dim() == 3 and x.shape[0] == shape[0] and x.shape[2] == length:
                return _elsewhere(x, valid.reshape(shape[0], 1, length))
            return x

        changed = [other(x) if isinstance(x, Tensor) else x for x in tensors]
        tensors[masks[0]] = changed[masks[0]] = masked
        return self._spreading(tree_unflatten(changed, layout), tree_unflatten(tensors, layout), lambda x: x)

    def _masks(self, leaves: Sequence[Any]) -> list[int]:
        """The inputs that may be masks over positions: rows of zeros and ones that look nothing up in a table."""
        found = []
        values = iter(self.recorded.inputs)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            value = next(values)
            rows = leaf.dim() == 2 and leaf.shape[1] > 1 and bool(((leaf == 0) | (leaf == 1)).all())
            if rows and not self._looks_up(value):
                found.append(place)
        return found

    def _looks_up(self, value: int) -> bool:
        """Whether a value, perhaps cast or shifted, is the index of an embedding."""
        todo, seen = [value], set()
        while todo:
            for user in self._readers.get(todo.pop(), ()):
                node = self.recorded.nodes[user]
                if packet(node) in ("embedding", "index_select", "gather", "one_hot"):
                    return True
                if user not in seen and packet(node) in _CARRIES | ADDS:
                    seen.add(user)
                    todo.extend(v for v in node.outputs if not self.recorded.values[v].dtype.is_floating_point)
        return False

    def _spreading(
        self, one: tuple[Any, Any], two: tuple[Any, Any], part: Callable[[Tensor], Tensor | None]
    ) -> tuple[str, ...]:
        """Norms that carry the difference between two runs to elements which it had not reached.

        Where a set shares a statistic, all its outputs follow any of its inputs; so an element whose input is the same
        to the bit in both runs, and whose output is not, shares its statistic with what differs.
        """
        runs = [self._calls(args, kwargs, part) for args, kwargs in (one, two)]
        if runs[0] is None or runs[1] is None:
            return ()
        found: dict[str, None] = {}
        for (name, number), (x, y) in runs[0].items():
            before, after = runs[1].get((name, number), (None, None))
            if x is None or y is None or before is None or after is None:
                continue
            if x.shape != before.shape or y.shape != after.shape or x.shape != y.shape:
                continue
            spec = self.occurrences[name].identification.spec
            if _spreads(spec, x, y, before, after):
                found[name] = None
        return tuple(found)

    def _calls(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], part: Callable[[Tensor], Tensor | None]
    ) -> dict[tuple[str, int], tuple[Tensor | None, Tensor | None]] | None:
        """Part of the input and the output of every call of every norm; None where the model cannot be run so."""
        kept: dict[tuple[str, int, str], Tensor | None] = {}

        def keeper(key: tuple[str, int, str]) -> Callable[[Tensor], None]:
            def keep(x: Tensor) -> None:
                some = part(x.detach())
                kept[key] = None if some is None else some.clone()

            return keep

        watch = Watch()
        keys = []
        for name, occurrence in self.occurrences.items():
            for number, call in enumerate(occurrence.calls):
                points = self._finder.point(call.inputs[0]), self._finder.point(call.output)
                if points[0] is not None and points[1] is not None:
                    keys.append((name, number))
                    watch.value(points[0], keeper((name, number, "in")))
                    watch.value(points[1], keeper((name, number, "out")))
        if not self._run(args, kwargs, watch):
            return None
        return {(n, i): (kept.get((n, i, "in")), kept.get((n, i, "out"))) for n, i in keys}

    # ---- activation checkpointing ----

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Norm modules that run again in the backward pass: activation checkpointing recomputes them."""
        if not self.real:
            return ()
        model = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        counts: Counter[str] = Counter()
        with undisturbed():
            try:
                twin = private_copy(model)
                for part, original in zip(twin.modules(), model.modules(), strict=True):
                    part.training = original.training
                for own, original in zip(twin.parameters(), model.parameters(), strict=True):
                    own.requires_grad_(original.requires_grad)
                for name, occurrence in self.occurrences.items():
                    if occurrence.module is not None:
                        path = next((n for n, m in model.named_modules() if m is occurrence.module), None)
                        if path is not None:
                            twin.get_submodule(path).register_forward_pre_hook(
                                lambda *_, key=name: counts.update([key])
                            )
                args, kwargs = tree_map_only(Tensor, _for_gradients, (self.args, self.kwargs))
                with torch.enable_grad():
                    outputs = [
                        t for t in tree_leaves(_plain(twin(*args, **kwargs)))
                        if isinstance(t, Tensor) and t.requires_grad
                    ]  # fmt: skip
                    forward = Counter(counts)
                    if outputs:
                        torch.autograd.backward([t.float().sum() for t in outputs])
            except (Exception, SystemExit):
                return ()
        return tuple(name for name in self.occurrences if counts[name] > forward[name])

    # ---- half precision ----

    def half(self, name: str, dtype: torch.dtype) -> HalfRange | None:
        """How a norm in a half precision differs from itself in float32; None where it cannot be run by itself."""
        if name not in self._half:
            with undisturbed():
                try:
                    self._half[name] = self._half_range(self.occurrences[name], dtype)
                except (Exception, SystemExit):
                    self._half[name] = None
        return self._half[name]

    def _half_range(self, occurrence: Occurrence, dtype: torch.dtype) -> HalfRange:
        found = occurrence.identification
        probe = self._probe(occurrence)
        if found.input is not None:
            probe.x_key = found.input
        probe.second = found.gate if found.gate is not None else found.residual
        probe.second_value = 0.0 if found.residual is not None else 1.0
        x = probe.spread(probe.settle(probe.shapes_to_try()))

        def fails(scale: float) -> bool:
            z = (x * scale).to(dtype)
            expected = probe(z.float())
            with probe.parameters_in(dtype):
                y = probe(z).float()
            if not bool(torch.isfinite(expected).all()):
                return False
            wrong = (y - expected).abs()
            return not bool((wrong <= 0.5 * expected.abs() + 1e-3 * expected.abs().max()).float().mean() > 0.5)

        large = next((2.0**k for k in range(1, 13) if fails(2.0**k)), None)
        small = next((2.0**-k for k in range(1, 16) if fails(2.0**-k)), None)
        zeros = torch.zeros_like(x)
        expected = probe(zeros)
        with probe.parameters_in(dtype):
            y = probe(zeros.to(dtype))
        nan = bool(torch.isfinite(expected).all()) and not bool(torch.isfinite(y).all())
        return HalfRange(large, small, nan)

    def _probe(self, occurrence: Occurrence) -> Probe:
        if occurrence.module is not None:
            args, kwargs = example_of(self.recorded.calls_of(occurrence.name)[0])
            return Probe(occurrence.module, args, kwargs)
        call = occurrence.calls[0]
        value = self.recorded.values[call.inputs[0]]
        replay = Replay(self.recorded, call.inputs[0], call.output, tuple(sorted(call.nodes)))
        return Probe(replay, (torch.empty(value.shape, dtype=value.dtype, device="meta"),), {})

    # ---- heads ----

    def attention_input(self, name: str) -> tuple[int, int] | None:
        """(the attention that a norm of queries or keys feeds, the features it contracts): a node, and a size."""
        trace = self.recorded
        call, spec = self.occurrences[name].calls[0], self.occurrences[name].identification.spec
        at = spec.channel_dim if spec is not None and isinstance(spec.channel_dim, int) else -1
        todo: list[tuple[int, Dims | None]] = [(call.output, frozenset((at % len(trace.values[call.output].shape),)))]
        seen: set[int] = set()
        while todo and len(seen) < 200:
            value, dims = todo.pop(0)
            for user in self._readers.get(value, ()):
                if user in seen:
                    continue
                seen.add(user)
                node = trace.nodes[user]
                dim = _contracted(node.name, node.inputs.index(value), len(trace.values[value].shape))
                if dim is not None and (dims is None or dim in dims):
                    return user, trace.values[value].shape[dim]
                if not any(word in node.name for word in ("mm", "softmax", "convolution")):
                    ahead = None if dims is None else followed(trace, node, value, dims)
                    todo.extend((v, ahead) for v in node.outputs if trace.values[v].dtype.is_floating_point)
        return None

    def reads(self, name: str, other: str) -> bool:
        """Whether a norm reads the very output of another, with nothing but views, casts and dropout between."""
        trace = self.recorded
        todo = [call.output for call in self.occurrences[other].calls]
        wanted = {call.inputs[0] for call in self.occurrences[name].calls}
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            if value in wanted:
                return True
            for user in self._readers.get(value, ()):
                if user not in seen and packet(trace.nodes[user]) in _CARRIES:
                    seen.add(user)
                    todo.extend(trace.nodes[user].outputs)
        return False

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for node in self.recorded.nodes:
            for value in node.inputs:
                found.setdefault(value, []).append(node.index)
        return found


def _contracted(op: str, position: int, rank: int) -> int | None:
    """Which dim of an input an operator sums over in products of two activations."""
    if op.startswith("aten._scaled_dot_product"):
        return rank - 1
    if op.startswith(("aten.bmm", "aten.baddbmm")):
        first = 0 if "bmm" in op and "badd" not in op else 1
        return rank - 1 if position == first else rank - 2
    return None


def _values(x: Tensor, spec: NormSpec | None) -> InputValues:
    finite = bool(torch.isfinite(x).all())
    largest = float(x.detach().abs().nan_to_num().max()) if x.numel() else 0.0
    if spec is None or spec.frozen or (spec.gate is not None and spec.gate[1] == "before") or x.numel() == 0:
        return InputValues(largest, finite, None, None)
    try:
        square = statistics(x.detach().float(), spec).square.flatten()
    except (RuntimeError, ValueError, IndexError):
        return InputValues(largest, finite, None, None)
    square = square[torch.isfinite(square) & (square > 0)]
    if not len(square):
        return InputValues(largest, finite, None, None)
    s = float(square.double().median())
    divisor = {
        "variance": (s + spec.eps) ** 0.5,
        "std": s**0.5 + spec.eps,
        "floor": max(s**0.5, spec.eps),
    }[spec.eps_at]
    return InputValues(largest, finite, s**0.5 / divisor, s)


def _together(values: list[InputValues]) -> InputValues:
    """Of several calls the one where eps counts most."""
    known = [v for v in values if v.kept is not None]
    least = min(known, key=lambda v: v.kept or 0.0) if known else values[0]
    return InputValues(
        max(v.largest for v in values), all(v.finite for v in values), least.kept, least.mean_square
    )  # fmt: skip


def _elsewhere(x: Tensor, valid: Tensor) -> Tensor:
    """Something else where a position is not valid: another token, other values."""
    if x.is_floating_point():
        other = x.flip(-1) * 2 + x.std() + 0.5
    elif x.dtype == torch.bool:
        return x
    else:
        other = torch.where(x == x.max(), x.min(), x.max())  # ids that the input holds are ids that the model knows
    return torch.where(valid, x, other.to(x.dtype))


def _spreads(spec: NormSpec | None, x: Tensor, y: Tensor, before: Tensor, after: Tensor) -> bool:
    if spec is not None and spec.axes == "features" and isinstance(spec.channel_dim, int):
        return False  # one position is one set
    same = (x == before) & torch.isfinite(x)
    moved = (y.float() - after.float()).abs() > 1e-4 * y.float().abs().nan_to_num().mean()
    return bool((same & moved).any())


def _for_gradients(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return x.float().clone().requires_grad_() if x.is_floating_point() else x


def _plain(output: Any) -> Any:
    """A model's output as containers that pytree knows."""
    if isinstance(output, Tensor | list | tuple):
        return output
    return dict(output) if isinstance(output, Mapping) else dict(vars(output))
