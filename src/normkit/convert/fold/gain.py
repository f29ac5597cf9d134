"""fold: a norm's gain and bias into the linear maps that follow it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.find import Occurrence
from normkit.convert.edit import Edit, Editor
from normkit.convert.fold.linear import Linear, Unfoldable, respond, scale_in
from normkit.convert.fold.paths import check_path, following
from normkit.convert.fold.plan import (
    Scene,
    Step,
    Tied,
    add_to_bias,
    bias_slot,
    carry_out,
    check_model,
    feature_dim,
    finite,
    short,
    stored,
    widened_copy,
)
from normkit.convert.fold.proof import FoldReceipt, Proof
from normkit.convert.fold.tied import Tie, untie_edit, untie_note
from normkit.convert.receipt import Refusal
from normkit.spec import NormSpec

_WORDS = {
    "post": "its gain is on the identity path of the residual stream (post-norm)",
    "output": "it is an output norm: its result goes into the residual stream, not into a linear map",
    "qk": "it normalizes queries or keys: what follows is attention (behind a rotary embedding), no linear map",
}


def fold(
    model: nn.Module,
    *example_args: Any,
    untie: bool = False,
    only: Collection[str] | None = None,
    new_biases: bool = True,
    **example_kwargs: Any,
) -> FoldReceipt:
    r"""Fold each norm's gain and bias into the linear maps that follow, where that is exact::

        W (x̂ * g + b) + c  =  (W diag(g)) x̂ + (W b + c)         g = weight_offset + weight

    Afterwards the norm's effective gain is 1 (a stored weight of ``1 - weight_offset``) and its bias 0; the norm
    itself stays. Which maps follow is read from the dataflow of one run. The result is proved on copies, in float64
    and in the model's dtype, outputs and gradients, before the model is touched.

    Args:
        model: any module with values; changed in place. Its training flags decide what runs, so call ``eval()``.
        example_args, example_kwargs: what to call it with.
        untie: whether a head that shares its weight with the embedding gets a copy of its own first.
        only: names of norms to fold; all by default.
        new_biases: whether a map without a bias gets one where the norm has one. If not, such a norm keeps its bias,
            divided by its gain, which must have no zeros then: ``W (x̂ * g + b) = (W diag(g)) (x̂ + b / g)``.

    Returns:
        A receipt: what was folded, what was refused and why, the measured differences. ``undo()`` restores every bit.

    Raises:
        ConversionError: the model cannot be run, or the proof fails; nothing is changed.
        TypeError, ValueError: no module, no example inputs, a name in ``only`` that is no norm.
    """
    example = check_model(model, example_args, example_kwargs)
    proof = Proof(model, example)
    scene = Scene(widened_copy(model), example)
    _check_only(scene, only)
    plan = _plan(scene, only, new_biases)
    first: list[Edit] = []
    notes: list[str] = []
    if untie and plan.ties:
        first = [untie_edit(tie) for tie in plan.ties]
        notes = [untie_note(tie) for tie in plan.ties]
        plan = _plan(Scene(widened_copy(model, first), example), only, new_biases)
    if plan.biases:
        notes.append(f"new parameters, where a norm had a bias and the map had none: {', '.join(plan.biases)}")
    return carry_out("fold", model, proof, plan.steps, plan.refused, first=first, notes=notes)


@dataclass
class _Plan:
    steps: list[Step]
    refused: list[Refusal]
    ties: list[Tie]
    biases: dict[str, str]


def _check_only(scene: Scene, only: Collection[str] | None) -> None:
    unknown = sorted(set(only or ()) - {n.name for n in scene.norms})
    if unknown:
        raise ValueError(f"only names {', '.join(unknown)}; the norms are {', '.join(n.name for n in scene.norms)}")


def _plan(scene: Scene, only: Collection[str] | None, new_biases: bool) -> _Plan:
    plan = _Plan([], [], [], {})
    for norm in scene.norms:
        if only is not None and norm.name not in only:
            continue
        try:
            plan.steps.append(_step(scene, norm, plan, new_biases))
        except Unfoldable as error:
            reason = str(error)
            words = _WORDS.get(scene.placements.get(norm.name, ""))
            if words is not None and not isinstance(error, Tied | _Nothing):
                reason = f"{words}; {reason}"
            plan.refused.append(Refusal(norm.name, reason))
    return plan


class _Nothing(Unfoldable):
    """There is nothing to fold."""


def _step(scene: Scene, norm: Occurrence, plan: _Plan, new_biases: bool) -> Step:
    spec = norm.identification.spec
    if spec is None:
        raise _Nothing(f"it is no norm that a NormSpec describes: {norm.identification.reason}")
    if stored(norm):
        raise _Nothing("it divides by stored statistics: fold_batch_norm takes it away as a whole")
    weight, bias = scene.parameter(norm, "weight"), scene.parameter(norm, "bias")
    if weight is None and bias is None:
        raise _Nothing("it has neither gain nor bias")
    if spec.weight_shape == "per_head":
        raise Unfoldable("it has a gain for each head, with more dims than the features that it normalizes")
    gain, shift = _affine(Editor(scene.model), spec, weight, bias)
    if not finite(gain, shift):
        raise Unfoldable("its gain or bias is not finite")
    if bool((gain == 1).all()) and not bool(shift.any()):
        raise _Nothing("its gain is 1 and its bias 0 already")
    for name in (weight, bias):
        if name is not None and len(slots := scene.slots(name)) > 1:
            raise Unfoldable(f"its parameter is shared: {', '.join(slots)} are one tensor")
    moved = bool(shift.any())
    linears = _linears(scene, norm, shifted=moved and new_biases, plan=plan)
    kept = moved and not new_biases and any(linear.bias is None for linear in linears)
    if kept and bool((gain == 0).any()):
        raise Unfoldable("its bias has no place in the maps that follow, and its gain, having zeros, cannot divide it")
    if moved and not kept:
        if not new_biases:
            _linears(scene, norm, shifted=True, plan=plan)  # a shift must pass what lies between as well
        for linear in linears:
            _check_shift(scene, linear, linears, norm.name, plan)

    def edit(editor: Editor) -> None:
        gain, shift = _affine(editor, spec, weight, bias)
        for linear in linears:
            matrix = editor.tensor(linear.weight).double()
            wide = gain.expand(_features(linear, matrix)) if gain.numel() == 1 else gain.reshape(-1)
            if moved and not kept:
                add_to_bias(editor, linear, respond(matrix, shift.reshape(-1), linear))
            editor.write(linear.weight, scale_in(matrix, wide, linear))
        if weight is not None:
            editor.write(weight, torch.full_like(editor.tensor(weight), 1 - spec.weight_offset))
        if bias is not None:
            editor.write(bias, shift / gain if kept else torch.zeros_like(editor.tensor(bias)))

    into = ", ".join(short(linear) for linear in linears)
    parts = [p for p, there in (("gain", weight is not None), ("bias", bias is not None and not kept)) if there]
    return Step(norm.name, f"{' and '.join(parts)} into {into}{'; its bias stays, by its gain' if kept else ''}", edit)


def _features(linear: Linear, weight: Tensor) -> int:
    size = weight.shape[linear.in_axis]
    return size * linear.groups if linear.convolution and not linear.transposed else size


def _affine(editor: Editor, spec: NormSpec, weight: str | None, bias: str | None) -> tuple[Tensor, Tensor]:
    """The norm's gain as its module forms it, and its bias, in float64."""
    shift = None if bias is None else editor.tensor(bias).double()
    if weight is None:
        assert shift is not None
        return torch.ones_like(shift), shift
    held = editor.tensor(weight)
    gain = held + spec.weight_offset if spec.gain_dtype == "input" else held.double() + spec.weight_offset
    gain = gain.double()
    return gain, torch.zeros_like(gain) if shift is None else shift


def _linears(scene: Scene, norm: Occurrence, *, shifted: bool, plan: _Plan) -> list[Linear]:
    """The linear maps that read a norm, each weight once, after all that must hold was checked."""
    graph = scene.graph
    paths = [path for call in norm.calls for path in following(graph, call.output)]
    for path in paths:
        start = (path.source, feature_dim(norm, len(scene.trace.values[path.source].shape)))
        check_path(graph, path, start, (path.linear.data, path.linear.data_dim), shifted=shifted)
    nodes = {path.linear.node for path in paths}
    by_leaf = {path.linear.leaf: path.linear for path in paths}
    if any(by_leaf[p.linear.leaf].in_axis != p.linear.in_axis for p in paths):
        raise Unfoldable("one weight is applied along two of its axes")
    tied: Tied | None = None
    for linear in by_leaf.values():
        _check_floating(scene, linear)
        try:
            scene.check_own(linear.weight, linear.leaf, nodes)
        except Tied as error:
            own = [s for s in error.slots if s.rpartition(".")[0] == linear.module]
            others = tuple(s for s in error.slots if s not in own)
            if len(own) == 1 and others:
                plan.ties.append(Tie(own[0], others))
            tied = error
    if tied is not None:
        raise tied
    return list(by_leaf.values())


def _check_floating(scene: Scene, linear: Linear) -> None:
    if not scene.trace.leaves[linear.leaf].is_floating_point():
        raise Unfoldable(f"{linear.weight} is quantized")


def _check_shift(scene: Scene, linear: Linear, linears: list[Linear], name: str, plan: _Plan) -> None:
    """See that a linear map can take a shift: its bias is its own, or there is a place for one."""
    respond(scene.trace.leaves[linear.leaf], _zeros(scene, linear), linear)  # raises where a shift is not uniform
    if linear.bias is None:
        slot = bias_slot(scene.model, linear)
        if slot is None:
            raise Unfoldable(f"{linear.module or linear.weight} has no bias that could take the norm's")
        plan.biases[slot] = name
        return
    assert linear.bias_leaf is not None
    values = scene.trace.values
    users = {values[m.output].producer for m in linears} | {m.node for m in linears}
    every = {n for n in scene.graph.uses(linear.bias_leaf) if n not in users}
    same = {m.node for n in every if (m := scene.graph.linear(n)) is not None and m.leaf == linear.leaf}
    if len(scene.slots(linear.bias)) > 1 or every - same:
        raise Unfoldable(f"{linear.bias} is used elsewhere too")


def _zeros(scene: Scene, linear: Linear) -> Tensor:
    weight = scene.trace.leaves[linear.leaf]
    return torch.zeros(_features(linear, weight), dtype=weight.dtype, device=weight.device)
