"""Find every norm in a trace: modules, and norms written inline as operators.

A norm divides by a statistic, so each one holds an operator that forms a statistic (or the root of a stored one).
Those operators are the leads. Going up from a lead, the innermost module call that behaves as a norm is one; leads
that no module accounts for are followed through the operators until the value that they were formed of is divided
by them, and that slice of operators is probed like a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from normkit.audit.find.inline import WEIGHT_NORMALIZATION, InlineNorms, Occurrence, renamed
from normkit.audit.find.lookalikes import quantizes
from normkit.audit.find.operators import (
    FUSED,
    MIXING,
    ROOT,
    STATISTIC,
    WEIGHT_NORM,
    packet,
    running_statistics,
    sums_by_product,
)
from normkit.audit.identify import Identification, identify
from normkit.audit.identify.alike import alike
from normkit.audit.identify.probe import merged
from normkit.audit.place import NormCall
from normkit.audit.trace.graph import ModuleCall, Opaque, TensorInfo, Trace
from normkit.audit.trace.wrappers import class_name
from normkit.placement import NormPosition


def find_norms(trace: Trace, progress: Callable[[str], None] = lambda _: None) -> list[Occurrence]:
    """Every norm in the trace, modules first in order of their first call, then inline ones."""
    leads = _leads(trace)
    claimed: set[int] = set()
    finder = InlineNorms(trace, claimed)
    occurrences = list(_module_norms(trace, leads, claimed, finder, progress))
    inline = list(finder.all([n for n in leads if n not in claimed]))
    first = {id(o): min(min(c.nodes) for c in o.calls) for o in (*occurrences, *inline)}
    return sorted((*occurrences, *inline), key=lambda o: first[id(o)])


def _leads(trace: Trace) -> list[int]:
    """Nodes that form a statistic, or take a root (frozen norms have no other trace)."""
    kinds, products = FUSED | STATISTIC | ROOT | WEIGHT_NORM, sums_by_product(trace)
    return [node.index for node in trace.nodes if node.index in products or packet(node) in kinds]


def _module_norms(
    trace: Trace, leads: Sequence[int], claimed: set[int], finder: InlineNorms, progress: Callable[[str], None]
) -> Iterator[Occurrence]:
    """Innermost module calls that behave as norms, each module probed once."""
    by_name: dict[str, list[ModuleCall]] = {}
    for call in trace.calls:
        by_name.setdefault(call.name, []).append(call)
    candidates = _candidates(trace, leads)
    indices = {call.index for call in candidates}
    done: set[str] = set()
    known: dict[Any, Identification] = {}  # a layer's norms mostly repeat in the next layer

    def identified(call: ModuleCall) -> Identification:
        if any(packet(trace.nodes[n]) in WEIGHT_NORM for n in call.nodes):
            return WEIGHT_NORMALIZATION
        key = (alike(call.module), _layouts(call))
        if key not in known:
            args, kwargs = example_of(call)
            known[key] = identify(call.module, *args, **kwargs)
        return known[key]

    for call in sorted(candidates, key=lambda c: (c.last - c.first, -c.index)):
        if call.name in done or any(n in claimed for n in call.nodes):
            continue
        progress(f"identifying {call.name}")
        identification = identified(call)
        while _lacks_gain(identification) and call.parent in indices:  # the gain may be its parent's
            above = trace.calls[call.parent]
            whole = identified(above)
            if whole.spec is None or _lacks_gain(whole) or not _is_same_norm(identification, whole):
                break
            call, identification = above, whole
        done.add(call.name)
        calls = [c for c in by_name[call.name] if c.outputs and c.nodes]  # without any, it hands its input on
        norm_calls = [_norm_call(trace, c, identification) for c in calls]
        if identification.spec is None and identification is not WEIGHT_NORMALIZATION:
            whole = [match for c in calls if (match := finder.whole(c, leads)) is not None]
            if whole and whole[0].identification is not WEIGHT_NORMALIZATION:
                prefix = f"{call.name}." if call.name else ""
                found = renamed(whole[0].identification, lambda name, lead=prefix: name.removeprefix(lead))
                identification = replace(found, reason=f"{found.reason} More operators follow inside.")
                norm_calls = [match.call for match in whole]
        if identification.kind == "none" or all(_statistics_only(c, finder) for c in calls):
            continue
        if identification.spec is None and any(quantizes(trace, trace.nodes[n]) for n in call.nodes):
            continue  # what it divides by is the step of its grid
        if identification.spec is None and not any(finder.depends_on_input(v) for v in call.inputs):
            identification = WEIGHT_NORMALIZATION  # a parametrization, run as a module
        for c in calls:
            claimed.update(c.nodes)
        yield Occurrence(
            call.name,
            class_name(call.module),
            identification,
            norm_calls,
            call.module,
            next((t for t in _infos(call) if t.dtype.is_floating_point), None),
        )


def _lacks_gain(found: Identification) -> bool:
    """Whether a module is a norm that multiplies by nothing and adds nothing."""
    spec = found.spec
    return spec is not None and not (spec.has_weight or spec.has_bias or spec.gate)


def _is_same_norm(inner: Identification, outer: Identification) -> bool:
    """Whether a module divides by the statistic that the module inside it divides by."""
    if inner.spec is None or outer.spec is None:
        return False
    same = all(getattr(inner.spec, f) == getattr(outer.spec, f) for f in ("axes", "centered", "statistic", "partial"))
    return same and math.isclose(inner.spec.eps, outer.spec.eps, rel_tol=0.02)


def _statistics_only(call: ModuleCall, finder: InlineNorms) -> bool:
    """Whether nobody reads what a call hands on first, but something else that it does (a scaler's scale)."""
    return not finder.is_read(call.outputs[0]) and any(finder.is_read(v) for v in call.outputs[1:])


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
    if found.identification is not WEIGHT_NORMALIZATION:
        return None
    output = found.calls[0].output
    users = (node for node in trace.nodes if output in node.inputs)
    return "conv" if any("conv" in packet(node) for node in users) else "inner"


def _candidates(trace: Trace, leads: Sequence[int]) -> list[ModuleCall]:
    """Module calls with a lead inside, no mixing operator, and an output shaped like an input."""
    inside: dict[int, list[int]] = {}
    mixing: set[int] = set()
    leads_set = set(leads)
    unmixed = running_statistics(trace)
    for node in trace.nodes:
        is_lead = node.index in leads_set
        # a lead that multiplies sums squares, and a running statistic adds up statistics: neither mixes features
        is_mixing = packet(node) in MIXING and not is_lead and node.index not in unmixed
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
        shape = trace.values[call.outputs[0]].shape
        if shape in shapes or any(merged(given, shape) for given in shapes):
            found.append(call)
    return found


def _float_inputs(trace: Trace, call: ModuleCall) -> tuple[int, ...]:
    return tuple(v for v in call.inputs if trace.values[v].dtype.is_floating_point)


def _infos(call: ModuleCall) -> list[TensorInfo]:
    found: list[TensorInfo] = []
    tree_map_only(TensorInfo, found.append, (call.args, call.kwargs))
    return found


def _layouts(call: ModuleCall) -> str:
    """A call's arguments without the values that stood in them."""
    infos = tree_map_only(TensorInfo, lambda i: (i.shape, i.stride, i.dtype), (call.args, call.kwargs))
    return repr(infos)


def example_of(call: ModuleCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like those of a recorded call: tensors on meta with the same layout, whose values nobody needs."""

    def tensor(info: TensorInfo) -> Tensor:
        device = "meta" if info.dtype.is_floating_point else "cpu"
        made = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=device)
        return made if info.dtype.is_floating_point else made.zero_()

    args = tree_map_only(TensorInfo, tensor, call.args)
    kwargs = tree_map_only(TensorInfo, tensor, call.kwargs)
    return tree_map_only(Opaque, lambda _: None, args), tree_map_only(Opaque, lambda _: None, kwargs)
