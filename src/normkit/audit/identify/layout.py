"""Which elements share a statistic: seen by changing one element and looking at which outputs move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.audit.identify.probe import NotANorm, Probe
from normkit.spec import Axes

Run = Callable[[Tensor], Tensor]
Span = tuple[int, int]
"""(start, length) of the part of one dim."""


class Layout(NamedTuple):
    """The part of a NormSpec that says which elements share a statistic."""

    axes: Axes
    channel_dim: int | tuple[int, ...]
    groups: int = 1

    def spans(self, shape: Sequence[int], index: Sequence[int]) -> tuple[Span, ...] | None:
        """The box of elements that share the statistic of the element at ``index``; None where it does not fit."""
        n = len(shape)
        whole = [(0, size) for size in shape]
        box = [(i, 1) for i in index]
        if isinstance(self.channel_dim, tuple):
            k = len(self.channel_dim)
            return None if k > n else (*box[: n - k], *whole[n - k :])
        if self.channel_dim == 1 and n < 2:
            return None
        channel = self.channel_dim % n
        if shape[channel] % self.groups:
            return None
        size = shape[channel] // self.groups
        block = (index[channel] // size * size, size)
        if self.axes == "features":
            box[channel] = block
            return tuple(box)
        spread = whole if self.axes == "batch" else [box[0], *whole[1:]]
        spread[channel] = block if self.axes == "group" else box[channel]
        return tuple(spread)

    def as_sets(self, x: Tensor) -> Tensor:
        """x as a matrix with one row for each statistic."""
        n = x.dim()
        if isinstance(self.channel_dim, tuple):
            return x.reshape(-1, math.prod(x.shape[n - len(self.channel_dim) :]))
        channel = self.channel_dim % n
        if self.axes == "features":
            return x.movedim(channel, -1).reshape(-1, x.shape[channel] // self.groups)
        if self.axes == "batch":
            return x.movedim(channel, 0).reshape(x.shape[channel], -1)
        rows = x.shape[channel] if self.axes == "instance" else self.groups
        return x.movedim(channel, 1).reshape(x.shape[0] * rows, -1)


@dataclass(frozen=True)
class Sharing:
    """What changing the first and the last element of the input showed."""

    first: tuple[Span, ...] | None
    last: tuple[Span, ...] | None
    elementwise: bool

    @property
    def leading_only(self) -> bool:
        """The last element moved nothing but itself, the first one others too: a leading share is normalized by."""
        return self.first is not None and self.last is not None and _count(self.first) > 1 == _count(self.last)


def sharing(run: Run, x: Tensor) -> Sharing:
    """Change the first and the last element of ``x``; where no box of outputs moves, the span is None."""
    first = moved_box(run, x, (0,) * x.dim())
    last = moved_box(run, x, tuple(n - 1 for n in x.shape))
    alone = first is not None and last is not None and _count(first) == _count(last) == 1
    return Sharing(first, last, alone)


def moved_box(run: Run, x: Tensor, index: tuple[int, ...]) -> tuple[Span, ...] | None:
    """The box of outputs that move with one element of ``x``; None where it is no box, or nothing moves."""
    step = 4 * math.sqrt(x.numel()) * float(x.abs().mean())
    before = run(x)
    moved = torch.zeros(x.shape, dtype=torch.bool)
    for change in (step, -step / 3):
        other = x.clone()
        other[index] += change
        moved |= changed(before, run(other))
    return box_of(moved)


def changed(a: Tensor, b: Tensor) -> Tensor:
    """Where two outputs differ by more than rounding."""
    return ~((a - b).abs() <= 1e-5 * float(a.abs().mean()))


def box_of(mask: Tensor) -> tuple[Span, ...] | None:
    """The box that the true elements fill exactly, or None."""
    places = mask.nonzero()
    if len(places) == 0:
        return None
    low, high = places.amin(0).tolist(), places.amax(0).tolist()
    box = tuple((a, b - a + 1) for a, b in zip(low, high, strict=True))
    return box if _count(box) == len(places) else None


def _count(box: Sequence[Span]) -> int:
    return math.prod(length for _, length in box)


def layouts(shape: tuple[int, ...], seen: Sharing) -> list[Layout]:
    """Every layout that explains what was seen, the likeliest first."""
    assert seen.first is not None
    n = len(shape)
    options = [Layout("features", -1), Layout("batch", 1), Layout("batch", -1)]
    options += [Layout("instance", 1), Layout("instance", -1)] if n > 2 else []
    options += [Layout("features", tuple(range(-k, 0))) for k in range(2, n + 1)]
    for channel in (1, -1):
        if n == 1:
            break
        length = seen.first[channel][1]
        groups = shape[channel] // length
        if n > 2 and groups == 1:
            options.append(Layout("group", channel))
        if groups > 1 and length > 1 and shape[channel] % length == 0:
            options += [Layout("group", channel, groups), Layout("features", channel, groups)]
    options.append(Layout("features", 1))
    if n == 2:  # one feature dim is the likelier reading, until another rank tells
        options.sort(key=lambda o: (o.axes == "group", o.channel_dim == 1 and o.axes != "batch"))
    if shape[0] == 1:  # a single sample does not show whether samples share a statistic: the rarer reading
        options.sort(key=lambda o: o.axes == "batch")
    start, end = (0,) * n, tuple(size - 1 for size in shape)
    fitting = [o for o in options if o.spans(shape, start) == seen.first]
    return [o for o in fitting if seen.leading_only or o.spans(shape, end) == seen.last]


def choose(probe: Probe, run: Run, shape: tuple[int, ...], options: list[Layout]) -> list[Layout]:
    """Tell apart layouts that agree on this shape, by inputs of another rank or size where the module takes them.

    Returns:
        Those that nothing speaks against, the likeliest first.

    Raises:
        NotANorm: no layout is left.
    """
    if not options:
        raise NotANorm("the elements that share a statistic are none of the known sets")
    higher_rank = False
    for other in (((shape[0], 5, *shape[1:])), (*shape, 5), (*shape, 5, 2)):
        if len(set(options)) == 1:
            break
        if len(shape) == 1 or not probe.accepts(other):
            continue
        higher_rank = True
        try:
            seen = sharing(run, probe.spread(other))
        except NotANorm:
            continue
        start = (0,) * len(other)
        left = [o for o in options if seen.first is not None and o.spans(other, start) == seen.first]
        options = left or options
    if len(options) > 1 and len(shape) > 2 and not higher_rank:
        # other sizes of the last dim are taken, other ranks are not: a norm over space, whose size is free
        free = probe.accepts((*shape[:-1], shape[-1] + 1))
        if free:
            options = sorted(options, key=lambda o: o.axes == "features")
    return options
