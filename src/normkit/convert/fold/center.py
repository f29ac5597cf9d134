"""layer_to_rms: LayerNorms over a residual stream become RMSNorms, by centring whatever writes to the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.find import Occurrence
from normkit.audit.find.operators import CASTS, VIEWS, packet
from normkit.audit.trace.graph import Node, ReplayError
from normkit.convert.edit import Edit, Editor, dress
from normkit.convert.fold.linear import Linear, Unfoldable
from normkit.convert.fold.plan import Scene, Step, Tied, carry_out, check_model, widened_copy
from normkit.convert.fold.proof import FoldReceipt, Proof
from normkit.convert.fold.tied import Tie, untie_edit, untie_note
from normkit.convert.receipt import Refusal
from normkit.nn import build
from normkit.spec import NormSpec

_PASSING = VIEWS | CASTS | {"slice", "select", "detach", "contiguous", "index_select", "index", "native_dropout"}
"""Operators that a stream passes unchanged, position by position; whether they keep the features whole is measured."""
_LOOKUPS = frozenset(["embedding", "index", "index_select"])
_SCALING = frozenset(["mul", "div"])
_SUMS = frozenset(["add", "sub", "cat", "stack"])
_CLOSE = 1e-11


def layer_to_rms(model: nn.Module, *example_args: Any, untie: bool = False, **example_kwargs: Any) -> FoldReceipt:
    r"""Turn LayerNorms over a residual stream into RMSNorms of the same gain and bias, by centring what writes to it::

        LN(x) = RMS(x - mean(x)),  so with mean(x) = 0 always, LN(x) = RMS(x):     W -> W - mean over the features

    Everything that writes to the stream is centred: token and position embeddings, output projections and their
    biases. Who writes and who reads is found from the dataflow of one run. The result is proved on copies, in float64
    and in the model's dtype, outputs and gradients, before the model is touched.

    Args:
        model: any module with values; changed in place.
        example_args, example_kwargs: what to call it with.
        untie: whether a head that shares its weight with the embedding gets a copy of its own first.

    Returns:
        A receipt: what was centred and replaced, what was refused and why, the measured differences. ``undo()``
        restores every bit.

    Raises:
        ConversionError: the model cannot be run, or the proof fails; nothing is changed.
        TypeError: no module, or no example inputs.

    Source: Ashkboos et al. 2024 (SliceGPT), arXiv:2401.15024, section 3.1.
    """
    example = check_model(model, example_args, example_kwargs)
    proof = Proof(model, example)
    plan = _plan(Scene(widened_copy(model), example))
    first: list[Edit] = []
    notes: list[str] = []
    if untie and plan.ties:
        first = [untie_edit(tie) for tie in plan.ties]
        notes = [untie_note(tie) for tie in plan.ties]
        plan = _plan(Scene(widened_copy(model, first), example))
    return carry_out(
        "layer_to_rms", model, proof, plan.steps, plan.refused, first=first, notes=notes,
        together=lambda step: plan.stream[step.name],
    )  # fmt: skip


@dataclass
class _Plan:
    steps: list[Step] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    stream: dict[str, str] = field(default_factory=dict)  # of each step: the first norm of its stream


@dataclass(frozen=True)
class _Writer:
    """What writes to a stream: a value, and the parameters (each with the axis of the features) that make it."""

    value: int
    dim: int
    parameters: tuple[tuple[str, int, int], ...]  # name, leaf, axis
    nodes: frozenset[int]
    words: str


@dataclass
class _Stream:
    """Values that are sums of the same writers, and the norms that read them."""

    norms: list[Occurrence] = field(default_factory=list)
    values: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)
    writers: dict[int, _Writer] = field(default_factory=dict)
    problem: Unfoldable | None = None


def _plan(scene: Scene) -> _Plan:
    plan = _Plan()
    layers = [n for n in scene.norms if n.identification.kind == "layer"]
    for stream in _streams(scene, layers):
        try:
            if stream.problem is not None:
                raise stream.problem
            plan.steps += _convert(scene, stream)
            plan.stream |= {n.name: stream.norms[0].name for n in stream.norms}
        except Unfoldable as error:
            if isinstance(error, Tied):
                plan.ties += _ties(scene, stream)
            reason = str(error)
            plan.refused += [Refusal(n.name, reason) for n in stream.norms]
    return plan


def _ties(scene: Scene, stream: _Stream) -> list[Tie]:
    """Writers' parameters that a linear map elsewhere shares: that one is to get a copy."""
    found = []
    for writer in stream.writers.values():
        for name, _, _ in writer.parameters:
            slots = scene.slots(name)
            found += [Tie(slot, (name,)) for slot in slots if slot != name]
    return found


# ---- streams ----


def _streams(scene: Scene, layers: Sequence[Occurrence]) -> list[_Stream]:
    """LayerNorms grouped by what they read: norms whose inputs share a value or a writer are on one stream."""
    streams: list[_Stream] = []
    for norm in layers:
        made = _Stream(norms=[norm])
        try:
            _check_norm(norm)
            for call in norm.calls:
                _collect(scene, call.inputs[0], made)
        except Unfoldable as error:
            made.problem = error
        joined = [s for s in streams if s.values & made.values or s.writers.keys() & made.writers.keys()]
        for other in joined:
            streams.remove(other)
            made = _merge(other, made)
        streams.append(made)
    return streams


def _merge(a: _Stream, b: _Stream) -> _Stream:
    return _Stream(
        [*a.norms, *b.norms],
        a.values | b.values,
        a.nodes | b.nodes,
        {**a.writers, **b.writers},
        a.problem or b.problem,
    )


def _check_norm(norm: Occurrence) -> None:
    spec = norm.identification.spec
    if norm.module is None or not norm.name:
        raise Unfoldable("it is written inline: there is no module to replace")
    if spec is None or spec.channel_dim != -1 or spec.groups != 1 or spec.partial != 1:
        raise Unfoldable("it is not over all the features of the last dim")
    if spec.weight_shape == "per_head" or spec.gate is not None:
        raise Unfoldable("it is gated or has a gain for each head")


def _collect(scene: Scene, start: int, stream: _Stream) -> None:
    """Follow a stream value back through sums to what writes it.

    Raises:
        Unfoldable: something writes that cannot be centred.
    """
    norms = {c.output: n.name for n in scene.norms for c in n.calls}
    fused = {c.inputs[0]: c for n in scene.norms for c in n.calls}
    linears = {m.output: m for n in scene.trace.nodes if (m := scene.graph.linear(n.index)) is not None}
    todo = [start]
    while todo:
        value = todo.pop()
        if value in stream.values:
            continue
        stream.values.add(value)
        if value in linears:
            stream.writers[value] = _projection(linears[value])
            continue
        if value in norms:
            raise Unfoldable(f"{norms[value]} writes to its stream: a norm's result cannot be centred by a weight")
        producer = scene.trace.producer(value)
        if producer is None:
            stream.writers[value] = _leaf(scene, value)
            continue
        name = packet(producer)
        if name in _LOOKUPS and scene.trace.values[producer.inputs[0]].origin == "parameter":
            stream.writers[value] = _embedding(scene, producer, value)
            continue
        added = _summands(scene, producer, value, fused)
        if added is None:
            where = scene.graph.where(producer)
            raise Unfoldable(f"{where} writes to its stream, and what it gives cannot be centred by a weight")
        stream.nodes.add(producer.index)
        todo += added


def _summands(scene: Scene, node: Node, value: int, fused: dict[int, Any]) -> list[int] | None:
    """The values whose sum (or reordering) a node is; None if it is neither."""
    name = packet(node)
    graph, values = scene.graph, scene.trace.values
    floats = [v for v in dict.fromkeys(node.inputs) if values[v].dtype.is_floating_point]
    if name in _SUMS:
        return floats
    if name in _SCALING:
        many = [v for v in floats if torch.Size(values[v].shape).numel() > 1]
        return many if len(many) == 1 and len(floats) <= 2 else None
    if name in _PASSING:
        return floats[:1]
    call = fused.get(value)
    if call is not None and len(node.outputs) > 1 and node.outputs.index(value) > 0:  # add and norm in one operator
        shape = values[value].shape
        dynamic = [v for v in floats if graph.dynamic(v) and values[v].shape == shape]
        return dynamic if len(dynamic) == 2 else None
    return None


def _projection(linear: Linear) -> _Writer:
    if linear.transposed or (linear.convolution and linear.out_axis != 0) or linear.out_axis < 0:
        raise Unfoldable(f"{linear.module} writes to its stream by a map that cannot be centred")
    parameters = [(linear.weight, linear.leaf, linear.out_axis)]
    if linear.bias is not None and linear.bias_leaf is not None:
        parameters.append((linear.bias, linear.bias_leaf, -1))
    return _Writer(
        linear.output, linear.out_dim, tuple(parameters), frozenset({linear.node}), linear.module or linear.weight
    )


def _embedding(scene: Scene, node: Node, value: int) -> _Writer:
    table = node.inputs[0]
    name = scene.trace.values[table].name
    return _Writer(value, -1, ((name, table, -1),), frozenset({node.index}), name)


def _leaf(scene: Scene, value: int) -> _Writer:
    found = scene.trace.values[value]
    if found.origin == "input":
        raise Unfoldable(f"input {found.name} of the model is on its stream as it is: nothing centres it")
    if found.origin != "parameter":
        raise Unfoldable(f"a {found.origin} ({found.name or 'computed'}) is added to its stream: it cannot be centred")
    return _Writer(value, -1, ((found.name, value, -1),), frozenset(), found.name)


# ---- converting one stream ----


def _convert(scene: Scene, stream: _Stream) -> list[Step]:
    _check_readers(scene, stream)
    _check_sums(scene, stream)
    parameters: dict[str, int] = {}
    for writer in stream.writers.values():
        for name, leaf, axis in writer.parameters:
            parameters[name] = axis
            users = set().union(*(w.nodes for w in stream.writers.values() if (name, leaf, axis) in w.parameters))
            producers = {scene.trace.values[w.value].producer for w in stream.writers.values()}
            scene.check_own(name, leaf, users | producers | stream.nodes)
    norms = stream.norms
    steps = []
    for position, norm in enumerate(norms):
        spec = norm.identification.spec
        assert spec is not None
        steps.append(Step(norm.name, "LayerNorm to RMSNorm", _edit(norm, spec, parameters if position == 0 else {})))
    words = [w.words for w in stream.writers.values()]
    first = steps[0]
    steps[0] = Step(first.name, f"{first.what}; centred: {', '.join(dict.fromkeys(words))}", first.edit)
    return steps


def _edit(norm: Occurrence, spec: NormSpec, parameters: dict[str, int]) -> Edit:
    def edit(editor: Editor) -> None:
        for name, axis in parameters.items():
            value = editor.tensor(name).double()
            editor.write(name, value - value.mean(axis, keepdim=True))
        old = editor.model.get_submodule(norm.name)
        weight, bias = (_held(old, path) for path in (norm.identification.weight, norm.identification.bias))
        like = next((t for t in (weight, bias, *old.parameters()) if t is not None), None)
        shape = norm.example.shape[-1] if norm.example is not None else (like.numel() if like is not None else 0)
        device, dtype = (None, None) if like is None else (like.device, like.dtype)
        new = build(spec.replace(centered=False), shape, device=device, dtype=dtype)
        for key, held in (("weight", weight), ("bias", bias)):
            if held is not None:
                new._parameters[key] = held
        editor.set_module(norm.name, dress(new, old))

    return edit


def _held(module: nn.Module, path: str | None) -> nn.Parameter | None:
    if path is None:
        return None
    owner, _, key = path.rpartition(".")
    held = getattr(module.get_submodule(owner), key)
    return held if isinstance(held, nn.Parameter) else nn.Parameter(held, requires_grad=False)


def _check_readers(scene: Scene, stream: _Stream) -> None:
    """Nothing but the norms (and the stream itself) may read the stream."""
    inside = {n for norm in stream.norms for call in norm.calls for n in call.nodes}
    for value in stream.values:
        if value in scene.trace.outputs:
            raise Unfoldable("the model returns its stream without a norm")
        if scene.trace.values[value].origin == "parameter":
            continue
        for node in scene.graph.readers(value):
            if node.index in stream.nodes or node.index in inside:
                continue
            if node.outputs and all(v in stream.values for v in node.outputs):
                continue
            if _only_shape(scene, node):
                continue
            raise Unfoldable(f"its stream is read elsewhere, without a norm ({scene.graph.where(node)})")


def _only_shape(scene: Scene, node: Node) -> bool:
    """Whether nobody uses what a node makes."""
    graph = scene.graph
    return packet(node) in VIEWS | CASTS and not any(graph.readers(v) or v in scene.trace.outputs for v in node.outputs)


def _check_sums(scene: Scene, stream: _Stream) -> None:
    """By replay: centred writers give a centred stream, which is the old one less its mean.

    Raises:
        Unfoldable: they do not (something between acts on single features).
    """
    generator = torch.Generator().manual_seed(0)
    values = scene.trace.values
    plain: dict[int, Tensor] = {}
    centred: dict[int, Tensor] = {}
    for value, writer in stream.writers.items():
        x = torch.randn(values[value].shape, generator=generator, dtype=torch.float64) + 1
        plain[value], centred[value] = x, x - x.mean(writer.dim, keepdim=True)
    for norm in stream.norms:
        for call in norm.calls:
            end = call.inputs[0]
            try:
                a = _sum(scene, stream, plain, end)
                b = _sum(scene, stream, centred, end)
            except (ReplayError, RuntimeError) as error:
                raise Unfoldable(f"the sums before {norm.name} cannot be run alone") from error
            wanted = a - a.mean(-1, keepdim=True)
            if float((b - wanted).abs().max()) > _CLOSE * float(a.abs().max()):
                raise Unfoldable(
                    "between what writes to its stream and the norm, features are scaled, bent or moved one by one"
                )


def _sum(scene: Scene, stream: _Stream, feeds: dict[int, Tensor], end: int) -> Tensor:
    """The stream at one point, from what the writers write; add and norm in one operator are replayed as an add."""
    known = dict(feeds)
    for index in sorted(stream.nodes):
        node = scene.trace.nodes[index]
        outputs = [v for v in node.outputs if v in stream.values]
        if not outputs or outputs[0] in known:
            continue
        if packet(node) in _SUMS | _SCALING | _PASSING:
            known[outputs[0]] = scene.graph.replay([index], known, outputs[0])
        else:
            shape = scene.trace.values[outputs[0]].shape
            parts = [known[v] for v in dict.fromkeys(node.inputs) if v in known and known[v].shape == shape]
            known[outputs[0]] = parts[0] + parts[1]
    return known[end]
