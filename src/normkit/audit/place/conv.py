"""Norms of convolutional parts, which are named by that rather than by their place on the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normkit.audit.place.flow import Add, Flow
from normkit.audit.place.roles import BATCH_STATISTICS, Role
from normkit.audit.place.scores import Ahead
from normkit.audit.place.streams import Streams


class Convolutions:
    """Which norms belong to convolutions.

    Args:
        flow, streams: the analysed trace.
        around: the residual adds that hold a norm.
        linked: the add whose branch and projection shortcut both read a norm.
    """

    def __init__(
        self, flow: Flow, streams: Streams, around: Mapping[int, Sequence[Add]], linked: Mapping[int, Add]
    ) -> None:
        self.flow = flow
        self.streams = streams
        self._around = around
        self._linked = linked
        self._conv_branch: dict[int, bool] = {}

    def holds(self, vertex: int, ahead: Ahead, seat: str) -> bool:
        """Whether a norm, placed so by the dataflow, is one of a convolutional part."""
        flow = self.flow
        if seat in ("final", "head", "qk"):
            if seat == "head" and self._follows_convolution(vertex):
                return True
            batch = self._has_batch_statistics(vertex)
            return batch and seat != "qk" and self._fed_by_convolution(vertex)
        fed = self._fed_by_convolution(vertex)
        if self._has_batch_statistics(vertex):
            spatial = len(flow.trace.values[flow.norms[vertex][1].output].shape) > 3
            if fed or spatial or any(flow.names[m] == "convolution" for m, _ in ahead.mixes):
                return True
        around = [*self._around.get(vertex, []), *([self._linked[vertex]] if vertex in self._linked else [])]
        if around:
            return all(self._on_grid(add) for add in around)
        data = flow.data[vertex]
        if seat == "post":
            last = None if data is None else self.streams.last_add(flow.root[data])
            return last is not None and self._on_grid(last)
        if not fed:
            return False
        if seat == "embedding" and ahead.identity and not any(self._on_grid(add) for add in ahead.identity):
            return False
        feeds = bool(ahead.mixes) and all(self._is_conv_vertex(mix) for mix, _ in ahead.mixes)
        first = ahead.identity[0] if ahead.identity else None
        direct = data is not None and self._is_conv_vertex(flow.root[data])
        return feeds or (direct and ahead.activated) or (first is not None and self._on_grid(first))

    def _is_conv_vertex(self, vertex: int) -> bool:
        return vertex >= 0 and self.flow.names[vertex].endswith("convolution")

    def _has_batch_statistics(self, vertex: int) -> bool:
        nodes = self.flow.norms[vertex][1].nodes
        return any(self.flow.names[n] in BATCH_STATISTICS for n in (*nodes, vertex))

    def _fed_by_convolution(self, vertex: int) -> bool:
        """Whether the nearest map before a norm is a convolution."""
        flow = self.flow
        data = flow.data[vertex]
        while data is not None:
            root = flow.root[data]
            if root < 0:
                return False
            if flow.roles[root] is Role.MIX:
                return self._is_conv_vertex(root)
            data = flow.data[root] if flow.roles[root] in (Role.NORM, Role.UNARY, Role.POOL) else None
            if data is None and flow.roles[root] in (Role.MUL, Role.ADD, Role.MERGE) and root not in flow.adds:
                data = next(iter(flow.actives(root)), None)  # none: learned queries start here
        return False

    def _follows_convolution(self, vertex: int) -> bool:
        """Whether a norm normalizes the very output of a convolution over space (a pyramid, a neck)."""
        data = self.flow.data[vertex]
        root = -1 if data is None else self.flow.root[data]
        return (
            self._is_conv_vertex(root) and len(self.flow.trace.values[self.flow.trace.nodes[root].outputs[0]].shape) > 3
        )

    def _on_grid(self, add: Add) -> bool:
        """Whether a branch belongs to a convolutional stream: most branches of the stream are convolutions only.

        A sequence that also attends is a transformer's, be its feed-forward layers convolutions.
        """
        if not self._all_convolutions(add):
            return False
        origin = self.streams.origin
        peers = [a for a in self.streams.adds.values() if origin[a.node] == origin[add.node]]
        if 2 * sum(self._all_convolutions(peer) for peer in peers) <= len(peers):
            return False
        spatial = len(self.flow.trace.values[self.flow.trace.nodes[add.node].outputs[0]].shape) > 3
        return spatial or not any(self._attends(peer) for peer in peers)

    def _attends(self, add: Add) -> bool:
        """Whether a branch holds a map of one activation by another."""
        flow = self.flow
        return any(flow.roles[v] is Role.MIX and len(flow.actives(v)) > 1 for v in add.interior)

    def _all_convolutions(self, add: Add) -> bool:
        """Whether a branch works on a grid: its maps are convolutions, at least one of them over space."""
        known = self._conv_branch.get(add.node)
        if known is None:
            flow = self.flow
            mixes = [v for v in add.interior if flow.roles[v] is Role.MIX]
            known = all(self._is_conv_vertex(v) for v in mixes) and any(flow.is_convolution(v) for v in mixes)
            self._conv_branch[add.node] = known
        return known
