"""fold_batch_norm: norms by stored statistics into the linear map before or after, or to a fixed affine map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.find import Occurrence
from normkit.convert.edit import Editor, dress
from normkit.convert.fold.linear import Linear, Unfoldable, respond, scale_in, scale_out
from normkit.convert.fold.paths import check_path, following, preceding
from normkit.convert.fold.plan import (
    Scene,
    Step,
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
from normkit.convert.receipt import Refusal
from normkit.spec import NormSpec


class FixedAffine(nn.Module):
    """``y = weight * x + bias``, one of each a channel: what a batch norm is in evaluation.

    Args:
        weight: the factors, ``(C,)``.
        bias: the shifts, ``(C,)``.
        channel_dim: which dim the channels are on: 1 or -1.

    Shape:
        ``(N, C, ...)`` or ``(N, ..., C)``, kept.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, channel_dim: int = 1) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.channel_dim = channel_dim

    def forward(self, input: Tensor) -> Tensor:
        behind = input.dim() - 1 - self.channel_dim % input.dim()
        shape = (-1, *[1] * behind)
        return torch.addcmul(self.bias.view(shape), input, self.weight.view(shape)).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, channel_dim={self.channel_dim}"


def fold_batch_norm(model: nn.Module, *example_args: Any, **example_kwargs: Any) -> FoldReceipt:
    r"""Fold every norm by stored statistics into the linear map before it, else after it, else to a fixed affine map::

        s = g / sqrt(var + eps),  t = b - mean * s
        after a map:   s * (W x + c) + t  =  (s W) x + (s c + t)
        before a map:  W (s * x + t) + c  =  (W s) x + (W t + c)         without padding, or with t = 0

    Linear, Conv1d to Conv3d and ConvTranspose1d to 3d with any groups. Which map is next to a norm is read from the
    dataflow of one run. The norm gives way to an `nn.Identity` or a `FixedAffine` with its hooks. The result is proved
    on copies, in float64 and in the model's dtype, outputs and gradients, before the model is touched.

    Args:
        model: any module with values, in eval mode; changed in place.
        example_args, example_kwargs: what to call it with.

    Returns:
        A receipt: where each norm went, what was refused and why, the measured differences. ``undo()`` restores every
        bit.

    Raises:
        ConversionError: the model cannot be run, or the proof fails; nothing is changed.
        TypeError: no module, or no example inputs.
    """
    example = check_model(model, example_args, example_kwargs)
    proof = Proof(model, example)
    steps: list[Step] = []
    refused: list[Refusal] = []
    scene = Scene(widened_copy(model), example)
    for norm in scene.norms:
        spec = norm.identification.spec
        if spec is None or not (spec.frozen or spec.running is not None or spec.axes == "batch"):
            continue
        try:
            steps.append(_step(scene, norm, spec))
        except Unfoldable as error:
            refused.append(Refusal(norm.name, str(error)))
    return carry_out("fold_batch_norm", model, proof, steps, refused)


def _step(scene: Scene, norm: Occurrence, spec: NormSpec) -> Step:
    if spec.running is None and not spec.frozen:
        raise Unfoldable("it keeps no running statistics: it divides by the batch's own")
    if not stored(norm):
        raise Unfoldable("it divides by the batch's own statistics here: call eval() first")
    if norm.module is None:
        raise Unfoldable("it is written inline: there is no module to take away")
    if not norm.name:
        raise Unfoldable("it is the model itself: wrap it in a module to convert it")
    if spec.gate is not None:
        raise Unfoldable("it is gated")
    names = {role: scene.parameter(norm, role) for role in ("weight", "bias", "running_mean", "running_var")}
    scale, shift = _affine(Editor(scene.model), spec, names)
    if not finite(scale, shift):
        raise Unfoldable("its statistics, gain or bias are not finite")
    reasons = []
    for attempt in (_after, _before):
        try:
            return attempt(scene, norm, spec, names)
        except Unfoldable as error:
            reasons.append(str(error))
    return _fixed(norm, spec, names, reasons)


def _affine(editor: Editor, spec: NormSpec, names: dict[str, str | None]) -> tuple[Tensor, Tensor]:
    """The factor and the shift of each channel, in float64."""

    def read(role: str) -> Tensor | None:
        name = names[role]
        return None if name is None else editor.tensor(name).double().reshape(-1)

    weight, bias, mean, var = (read(role) for role in ("weight", "bias", "running_mean", "running_var"))
    assert var is not None or mean is not None
    if var is None:
        assert mean is not None
        var = torch.ones_like(mean)
    root = {
        "variance": lambda: torch.sqrt(var + spec.eps),
        "std": lambda: torch.sqrt(var) + spec.eps,
        "floor": lambda: torch.sqrt(var).clamp_min(spec.eps),
    }[spec.eps_at]()
    gain = torch.ones_like(var) if weight is None else spec.weight_offset + weight
    scale = gain / root
    shift = torch.zeros_like(scale) if bias is None else bias.expand_as(scale)
    return scale, shift if mean is None else shift - mean * scale


def _removed(editor: Editor, norm: Occurrence, new: nn.Module) -> None:
    editor.set_module(norm.name, dress(new, editor.model.get_submodule(norm.name)))


def _after(scene: Scene, norm: Occurrence, spec: NormSpec, names: dict[str, str | None]) -> Step:
    """Into the linear map whose result it normalizes."""
    graph, values = scene.graph, scene.trace.values
    paths = [preceding(graph, call.inputs[0]) for call in norm.calls]
    linear = paths[0].linear
    if any(p.linear.leaf != linear.leaf for p in paths):
        raise Unfoldable("it follows several linear maps")
    if linear.out_axis < 0:
        raise Unfoldable("the outputs of the linear map before it are not on one axis of its weight")
    for path, call in zip(paths, norm.calls, strict=True):
        end = call.inputs[0]
        dim = feature_dim(norm, len(values[end].shape))
        check_path(graph, path, (path.source, path.linear.out_dim), (end, dim), shifted=True)
    scene.check_own(linear.weight, linear.leaf, {p.linear.node for p in paths})
    _check_bias(scene, linear, [p.linear for p in paths])

    def edit(editor: Editor) -> None:
        scale, shift = _affine(editor, spec, names)
        if linear.bias is not None:
            editor.write(linear.bias, editor.tensor(linear.bias).double() * scale)
        add_to_bias(editor, linear, shift)
        editor.write(linear.weight, scale_out(editor.tensor(linear.weight).double(), scale, linear))
        _removed(editor, norm, nn.Identity())

    return Step(norm.name, f"into the map before it, {short(linear)}", edit)


def _before(scene: Scene, norm: Occurrence, spec: NormSpec, names: dict[str, str | None]) -> Step:
    """Into the linear maps that read it."""
    graph, values = scene.graph, scene.trace.values
    _, shift = _affine(Editor(scene.model), spec, names)
    shifted = bool(shift.any())
    paths = [path for call in norm.calls for path in following(graph, call.output)]
    for path in paths:
        start = (path.source, feature_dim(norm, len(values[path.source].shape)))
        check_path(graph, path, start, (path.linear.data, path.linear.data_dim), shifted=shifted)
    linears = list({p.linear.leaf: p.linear for p in paths}.values())
    for linear in linears:
        scene.check_own(linear.weight, linear.leaf, {p.linear.node for p in paths})
        if shifted:
            respond(scene.trace.leaves[linear.leaf], shift, linear)
            _check_bias(scene, linear, [p.linear for p in paths])

    def edit(editor: Editor) -> None:
        scale, shift = _affine(editor, spec, names)
        for linear in linears:
            weight = editor.tensor(linear.weight).double()
            if shifted:
                add_to_bias(editor, linear, respond(weight, shift, linear))
            editor.write(linear.weight, scale_in(weight, scale, linear))
        _removed(editor, norm, nn.Identity())

    return Step(norm.name, f"into what follows, {', '.join(short(m) for m in linears)}", edit)


def _fixed(norm: Occurrence, spec: NormSpec, names: dict[str, str | None], reasons: list[str]) -> Step:
    """To an affine map of its own."""
    channel_dim = spec.channel_dim
    if not isinstance(channel_dim, int):
        raise Unfoldable(f"{reasons[0]}; its channels are not on one dim")

    def edit(editor: Editor) -> None:
        like = next(editor.tensor(n) for n in names.values() if n is not None)
        scale, shift = (t.to(like.dtype) for t in _affine(editor, spec, names))
        _removed(editor, norm, FixedAffine(scale, shift, channel_dim))

    said = "; ".join(dict.fromkeys(reasons))
    return Step(norm.name, f"to a fixed affine map ({said})", edit)


def _check_bias(scene: Scene, linear: Linear, users: list[Linear]) -> None:
    """See that a shift has a bias to go into, which nothing else reads."""
    if linear.bias is None:
        if bias_slot(scene.model, linear) is None:
            raise Unfoldable(f"{linear.module or linear.weight} has no place for a bias")
        return
    assert linear.bias_leaf is not None
    values = scene.trace.values
    nodes = {m.node for m in users} | {values[m.output].producer for m in users}
    if len(scene.slots(linear.bias)) > 1 or scene.graph.uses(linear.bias_leaf) - nodes:
        raise Unfoldable(f"{linear.bias} is used elsewhere too")
