"""Find every norm in a trace: modules, and norms written inline as operators.

A norm divides by a statistic, so each one holds an operator that forms a statistic (or the root of a stored one).
Those operators are the leads. Going up from a lead, the innermost module call that behaves as a norm is one; leads
that no module accounts for are followed through the operators until the value that they were formed of is divided
by them, and that slice of operators is probed like a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normkit.audit.graph import ModuleCall, Node, Opaque, ReplayError, TensorInfo, Trace
from normkit.audit.identify import Identification, identify
from normkit.audit.place import NormCall
from normkit.placement import NormPosition

# Operators by what they are to a norm. Packet names, so that overloads and in-place forms are one entry.
_FUSED = frozenset(
    [
        "native_layer_norm",
        "_fused_rms_norm",
        "rms_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_native_batch_norm_legit_functional",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_with_update",
        "_batch_norm_with_update",
        "_batch_norm_no_update",
        "instance_norm",
    ]
)
_STATISTIC = frozenset(["mean", "sum", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "einsum"])
_ROOT = frozenset(["rsqrt", "sqrt", "reciprocal", "pow"])
_RESHAPES = frozenset(["expand", "view", "_unsafe_view", "unsqueeze", "clone"])
_GAINS = frozenset(["mul", "add", "sub", "div", "_to_copy", "to"])
_WEIGHT_NORM = frozenset(["_weight_norm", "_weight_norm_interface"])
_MIXING = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "matmul",
        "convolution",
        "_convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "mkldnn_convolution",
        "embedding",
        "_softmax",
        "_log_softmax",
        "_grouped_mm",
        "_scaled_mm",
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
        "linear",
        "mkldnn_linear",
        "mkldnn_rnn_layer",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
        "max_pool2d_with_indices",
        "cumsum",
        "topk",
        "sort",
    ]
)
_WEIGHT_NORMALIZATION = Identification(
    kind="other", spec=None, reason="weight normalization: it normalizes a weight, not activations"
)
_LOOK_AHEAD = 12
"""How many operators a statistic may pass (eps, root, expand, casts) before it divides."""


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
        return self.module is None or self.identification is _WEIGHT_NORMALIZATION


def find_norms(trace: Trace, progress: Callable[[str], None] = lambda _: None) -> list[Occurrence]:
    """Every norm in the trace, modules first in order of their first call, then inline ones."""
    leads = _leads(trace)
    claimed: set[int] = set()
    occurrences = list(_module_norms(trace, leads, claimed, progress))
    inline = list(_inline_norms(trace, leads, claimed))
    first = {id(o): min(min(c.nodes) for c in o.calls) for o in (*occurrences, *inline)}
    return sorted((*occurrences, *inline), key=lambda o: first[id(o)])


def _packet(node: Node) -> str:
    return "" if node.op is None else node.op.overloadpacket.__name__.rstrip("_").removeprefix("aten.")


def _leads(trace: Trace) -> list[int]:
    """Nodes that form a statistic, or take a root (frozen norms have no other trace)."""
    kinds = _FUSED | _STATISTIC | _ROOT | _WEIGHT_NORM
    return [node.index for node in trace.nodes if _packet(node) in kinds]


def _module_norms(
    trace: Trace, leads: Sequence[int], claimed: set[int], progress: Callable[[str], None]
) -> Iterator[Occurrence]:
    """Innermost module calls that behave as norms, each module probed once."""
    by_name: dict[str, list[ModuleCall]] = {}
    for call in trace.calls:
        by_name.setdefault(call.name, []).append(call)
    candidates = _candidates(trace, leads)
    done: set[str] = set()
    for call in sorted(candidates, key=lambda c: (c.last - c.first, -c.index)):
        if call.name in done or any(n in claimed for n in call.nodes):
            continue
        done.add(call.name)
        progress(f"identifying {call.name}")
        args, kwargs = example_of(call)
        identification = identify(call.module, *args, **kwargs)
        if identification.kind == "none":
            continue
        if identification.spec is None and not any(_depends_on_input(trace, v) for v in call.inputs):
            identification = _WEIGHT_NORMALIZATION  # a parametrization, run as a module
        calls = [c for c in by_name[call.name] if c.outputs]
        for c in calls:
            claimed.update(c.nodes)
        yield Occurrence(
            call.name,
            type(call.module).__name__,
            identification,
            [_norm_call(trace, c, identification) for c in calls],
            call.module,
            next((t for t in _infos(call) if t.dtype.is_floating_point), None),
        )


def _norm_call(trace: Trace, call: ModuleCall, found: Identification) -> NormCall:
    """One call; an addition that the norm makes first stays outside it, so that it is seen as a residual add."""
    if found.residual is not None and len(call.outputs) > 1:
        total = call.outputs[1]
        maker = next((n for n in call.nodes if total in trace.nodes[n].outputs), None)
        if maker is not None:
            return NormCall((total,), call.outputs[0], frozenset(n for n in call.nodes if n > maker))
    return NormCall(_float_inputs(trace, call), call.outputs[0], call.nodes)


def weight_place(trace: Trace, found: Occurrence) -> NormPosition | None:
    """Where a normalized weight is used: in a convolution or elsewhere; None for a norm of activations."""
    if found.identification is not _WEIGHT_NORMALIZATION:
        return None
    output = found.calls[0].output
    users = (node for node in trace.nodes if output in node.inputs)
    return "conv" if any("conv" in _packet(node) for node in users) else "inner"


def _candidates(trace: Trace, leads: Sequence[int]) -> list[ModuleCall]:
    """Module calls with a lead inside, no mixing operator, and an output shaped like an input."""
    inside: dict[int, list[int]] = {}
    mixing: set[int] = set()
    leads_set = set(leads)
    for node in trace.nodes:
        is_lead, is_mixing = node.index in leads_set, _packet(node) in _MIXING
        if not (is_lead or is_mixing):
            continue
        call = node.call
        while call >= 0:
            if is_mixing:
                mixing.add(call)
            else:
                inside.setdefault(call, []).append(node.index)
            call = trace.calls[call].parent
    found = []
    for index in inside:
        call = trace.calls[index]
        if index in mixing or call.failed or len(call.outputs) == 0:
            continue
        shapes = {trace.values[v].shape for v in call.inputs if trace.values[v].dtype.is_floating_point}
        if trace.values[call.outputs[0]].shape in shapes:
            found.append(call)
    return found


def _float_inputs(trace: Trace, call: ModuleCall) -> tuple[int, ...]:
    return tuple(v for v in call.inputs if trace.values[v].dtype.is_floating_point)


def _infos(call: ModuleCall) -> list[TensorInfo]:
    found: list[TensorInfo] = []
    tree_map_only(TensorInfo, found.append, (call.args, call.kwargs))
    return found


def example_of(call: ModuleCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like those of a recorded call: tensors on meta with the same layout, whose values nobody needs."""

    def tensor(info: TensorInfo) -> Tensor:
        device = "meta" if info.dtype.is_floating_point else "cpu"
        made = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=device)
        return made if info.dtype.is_floating_point else made.zero_()

    args = tree_map_only(TensorInfo, tensor, call.args)
    kwargs = tree_map_only(TensorInfo, tensor, call.kwargs)
    return tree_map_only(Opaque, lambda _: None, args), tree_map_only(Opaque, lambda _: None, kwargs)


# Inline norms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slice:
    """Part of a trace; copies of a module that holds it share it, since it is only read."""

    trace: Trace
    source: int
    output: int
    nodes: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Slice:
        return self


class Replay(nn.Module):
    """A recorded slice of operators as a module of one input, for probing.

    The model's tensors that the slice uses are its parameters, so that a gain written inline is seen as one.
    """

    def __init__(self, trace: Trace, source: int, output: int, nodes: tuple[int, ...]) -> None:
        super().__init__()
        self.slice = _Slice(trace, source, output, nodes)
        used = {v for n in nodes for v in trace.nodes[n].inputs}
        for value in sorted(used):
            leaf = trace.leaves.get(value)
            if value != source and leaf is not None and trace.values[value].origin in ("parameter", "buffer"):
                if leaf.is_floating_point():
                    self.register_parameter(f"value{value}", nn.Parameter(leaf.detach(), requires_grad=False))
                else:
                    self.register_buffer(f"value{value}", leaf.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Run the slice on another input."""
        own = (*self.named_parameters(), *self.named_buffers())
        feeds = {int(name.removeprefix("value")): tensor for name, tensor in own}
        part = self.slice
        return part.trace.replay(part.nodes, feeds | {part.source: x})[part.output]


def _inline_norms(trace: Trace, leads: Sequence[int], claimed: set[int]) -> Iterator[Occurrence]:
    consumers = _consumers(trace)
    taken = set(claimed)
    found: dict[tuple[str, int], Occurrence] = {}
    numbers: dict[tuple[int, str], int] = {}
    for lead in leads:
        node = trace.nodes[lead]
        if lead in taken or _packet(node) in _ROOT:
            continue
        match = _weight_norm(trace, node) if _packet(node) in _WEIGHT_NORM else _match(trace, node, consumers, taken)
        if match is None:
            continue
        identification, call, source = match
        taken.update(call.nodes)
        owner = trace.calls[node.call] if node.call >= 0 else None
        name = owner.name if owner is not None else ""
        place = (node.call, name)
        number = numbers[place] = numbers.get(place, -1) + 1
        key = (name, number)
        if key in found:
            found[key].calls.append(call)
            continue
        value = trace.values[source]
        example = TensorInfo(source, value.shape, (), value.dtype, torch.device("meta"))
        found[key] = Occurrence(f"{name}#{number}", "inline", identification, [call], None, example)
    yield from found.values()


def _weight_norm(trace: Trace, node: Node) -> tuple[Identification, NormCall, int] | None:
    """Weight normalization normalizes a parameter: it is reported, and is no norm of activations."""
    return _WEIGHT_NORMALIZATION, NormCall(node.inputs, node.outputs[0], frozenset((node.index,))), node.inputs[0]


def _consumers(trace: Trace) -> dict[int, list[int]]:
    consumers: dict[int, list[int]] = {}
    for node in trace.nodes:
        for value in node.inputs:
            consumers.setdefault(value, []).append(node.index)
    return consumers


def _match(
    trace: Trace, node: Node, consumers: dict[int, list[int]], taken: set[int]
) -> tuple[Identification, NormCall, int] | None:
    """Follow a statistic to where it divides what it was formed of, and probe that slice."""
    for output in _endings(trace, node, consumers):
        found = None
        for source in _sources(trace, node, trace.values[output].shape, taken):
            nodes = tuple(trace.slice([source], output))
            if node.index not in nodes or not _closed(trace, nodes, source):
                continue
            value = trace.values[source]
            example = torch.empty(value.shape, dtype=value.dtype, device="meta")
            try:
                identification = identify(Replay(trace, source, output, nodes), example)
            except ReplayError:
                continue
            if identification.spec is None or identification.kind == "none":
                continue
            if not _depends_on_input(trace, source):
                identification = _WEIGHT_NORMALIZATION
            found = (
                identification,
                NormCall((source,), output, frozenset(nodes)),
                source,
            )  # a farther source takes in its casts
        if found is not None:
            return found
    return None


def _endings(trace: Trace, node: Node, consumers: dict[int, list[int]]) -> list[int]:
    """Values as large as the statistic's source that are reached from it through a few elementwise operators.

    The farthest come first, so that a gain, a bias and a last cast are taken in.
    """
    if _packet(node) in _FUSED:
        return [node.outputs[0]]
    largest = max((_numel(trace, v) for v in node.inputs), default=0)
    found: set[int] = set()
    reached = [(v, 0, False) for v in node.outputs]  # value, distance, whether the statistic has met its source
    seen: set[int] = set()
    while reached and largest > 0:
        value, distance, joined = reached.pop(0)
        if value in seen or distance > _LOOK_AHEAD:
            continue
        seen.add(value)
        for consumer in consumers.get(value, ()):
            after = trace.nodes[consumer]
            if _packet(after) in _MIXING or after.op is None or (joined and not _is_gain(trace, after, value)):
                continue
            for result in after.outputs:
                full = _numel(trace, result) == largest and (joined or _packet(after) not in _RESHAPES)
                if full:
                    found.add(result)
                reached.append((result, distance + 1, full))
    return sorted(found, reverse=True)[:6]


def _is_gain(trace: Trace, node: Node, value: int) -> bool:
    """A cast, or a product or sum with the model's own tensors alone."""
    own = all(trace.values[v].origin in ("parameter", "buffer", "constant") for v in node.inputs if v != value)
    return own and _packet(node) in _GAINS


def _sources(trace: Trace, node: Node, shape: tuple[int, ...], taken: set[int]) -> Iterator[int]:
    """Values of the output's shape that the statistic was formed of, nearest first, up to another norm's output."""
    todo, seen = list(node.inputs), set()
    candidates: list[int] = []
    for _ in range(_LOOK_AHEAD):
        ahead: list[int] = []
        for value in todo:
            if value in seen:
                continue
            seen.add(value)
            if trace.values[value].shape == shape and trace.values[value].dtype.is_floating_point:
                candidates.append(value)
            producer = trace.producer(value)
            if producer is not None and producer.index not in taken and _packet(producer) not in _MIXING:
                ahead.extend(producer.inputs)
        todo = ahead
    yield from candidates[:6]


def _closed(trace: Trace, nodes: tuple[int, ...], source: int) -> bool:
    """Whether the slice needs nothing but its source, constants and the model's own tensors."""
    if len(nodes) > 40:
        return False
    inside = {v for n in nodes for v in trace.nodes[n].outputs}
    for index in nodes:
        node = trace.nodes[index]
        if _packet(node) in _MIXING or node.op is None:
            return False
        for value in node.inputs:
            if value != source and value not in inside and trace.values[value].origin in ("node", "input"):
                return False
    return True


def _depends_on_input(trace: Trace, value: int) -> bool:
    """Whether a value was computed from the model's inputs rather than from its parameters alone."""
    todo, seen = [value], set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if trace.values[current].origin == "input":
            return True
        producer = trace.producer(current)
        if producer is not None:
            todo.extend(producer.inputs)
    return False


def _numel(trace: Trace, value: int) -> int:
    numel = 1
    for size in trace.values[value].shape:
        numel *= size
    return numel
