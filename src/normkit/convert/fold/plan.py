"""What all folds share: the traced float64 copy with its norms, and carrying out what the proof admits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.find import Occurrence, find_norms
from normkit.audit.place import NormSite, place
from normkit.audit.trace import Trace, trace
from normkit.convert.edit import Edit, Editor
from normkit.convert.fold.linear import Graph, Linear, Unfoldable
from normkit.convert.fold.proof import Example, FoldReceipt, Proof, Widened, failure, failure_in, twin
from normkit.convert.receipt import Change, ConversionError, Refusal
from normkit.placement import NormPosition


@dataclass(frozen=True)
class Step:
    """One norm's conversion."""

    name: str
    what: str
    edit: Edit


class Scene:
    """A float64 copy of a model that was run once: its graph, its norms and where they sit."""

    def __init__(self, copy: nn.Module, example: Example) -> None:
        self.model = copy
        wide = example.wide()
        with Widened():
            self.trace: Trace = trace(copy, wide.args, wide.kwargs)
        if self.trace.error is not None:
            raise ConversionError(f"{type(copy).__name__} could not be run in float64: {self.trace.error}")
        self.graph = Graph(self.trace)
        self.norms: list[Occurrence] = find_norms(self.trace)
        placed = place(self.trace, [NormSite(o.name, tuple(o.calls)) for o in self.norms])
        self.placements: Mapping[str, NormPosition] = placed.placements

    def parameter(self, norm: Occurrence, role: str) -> str | None:
        """The qualified name of a norm's weight, bias, running_mean or running_var."""
        path = getattr(norm.identification, role)
        if path is None or norm.module is None:
            return path
        return f"{norm.name}.{path}" if norm.name else path

    def slots(self, name: str) -> list[str]:
        """Every place in the model that holds this parameter, each module once."""
        owner, _, key = name.rpartition(".")
        held = getattr(self.model.get_submodule(owner), key)
        return [
            f"{path}.{key}".lstrip(".")
            for path, module in self.model.named_modules()
            for key, value in module._parameters.items()
            if value is held
        ]

    def check_own(self, name: str, leaf: int, nodes: Collection[int]) -> None:
        """See that a parameter is used at some nodes and nowhere else.

        Raises:
            Tied: another module holds it too.
            Unfoldable: it is used elsewhere.
        """
        slots = self.slots(name)
        if len(slots) > 1:
            raise Tied(name, slots)
        elsewhere = self.graph.uses(leaf) - set(nodes)
        if elsewhere:
            first = min(elsewhere)
            where = "the model's own output" if first < 0 else self.graph.where(self.trace.nodes[first])
            raise Unfoldable(f"{name} is used elsewhere too ({where})")


class Tied(Unfoldable):
    """A weight that two modules share."""

    def __init__(self, name: str, slots: Sequence[str]) -> None:
        self.slots = tuple(slots)
        others = ", ".join(s for s in slots if s != name)
        super().__init__(f"{name} is tied to {others}; untie=True (--untie) gives the linear map a copy of its own")


def bias_slot(model: nn.Module, linear: Linear) -> str | None:
    """Where a linear map without a bias takes one: its module's only parameter that is None."""
    empty = [key for key, value in model.get_submodule(linear.module)._parameters.items() if value is None]
    return f"{linear.module}.{empty[0]}".lstrip(".") if len(empty) == 1 else None


def add_to_bias(editor: Editor, linear: Linear, shift: Tensor) -> None:
    """Add to a linear map's bias, or give it one."""
    if linear.bias is not None:
        editor.write(linear.bias, editor.tensor(linear.bias).double() + shift)
        return
    slot = bias_slot(editor.model, linear)
    assert slot is not None
    like = editor.tensor(linear.weight)
    editor.set_parameter(slot, shift.to(like.dtype))


def short(linear: Linear) -> str:
    """The end of a linear map's name."""
    return ".".join((linear.module or linear.weight).split(".")[-2:])


def stored(norm: Occurrence) -> bool:
    """Whether a norm divides by stored statistics: in this run it is an affine map of each channel."""
    spec = norm.identification.spec
    if spec is None:
        return False
    return spec.frozen or (spec.running is not None and not norm.identification.uses_batch)


def feature_dim(norm: Occurrence, ndim: int) -> int:
    """The (first) feature dim of a norm's input, counted from the end."""
    spec = norm.identification.spec
    assert spec is not None
    if isinstance(spec.channel_dim, tuple):
        return spec.channel_dim[0]
    return spec.channel_dim if spec.channel_dim < 0 else spec.channel_dim - ndim


def check_model(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
    """Refuse what cannot be probed.

    Raises:
        TypeError: no module, or no example inputs.
        ConversionError: the model holds no values.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if not args and not kwargs:
        raise TypeError("example inputs are missing: give what the model is called with, to prove the result on")
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = next((name for name, tensor in tensors if nn.parameter.is_lazy(tensor) or tensor.is_meta), None)
    if empty is not None:
        raise ConversionError(f"{empty} has no values (meta device or lazy): load the weights first")
    return Example(args, kwargs)


def carry_out(
    conversion: str,
    model: nn.Module,
    proof: Proof,
    steps: Sequence[Step],
    refused: Sequence[Refusal],
    *,
    first: Sequence[Edit] = (),
    notes: Sequence[str] = (),
    together: Callable[[Step], str] | None = None,
) -> FoldReceipt:
    """Prove the steps on copies, leave out those that fail, and only then change the model.

    Args:
        conversion: its name.
        model: what to change.
        proof: of that model.
        steps: what to do.
        refused: what is left, with reasons.
        first: edits that come before the steps.
        notes: for the receipt, if anything is changed.
        together: steps of one group stand or fall together; each alone by default.

    Raises:
        ConversionError: the admitted steps together fail; nothing is changed.
    """
    left = list(refused)
    steps = list(steps)
    if not steps:
        return FoldReceipt(conversion=conversion, model=type(model).__name__, refused=tuple(left), revert=lambda: None)
    found = proof.float64([*first, *(s.edit for s in steps)])
    if failure(found) is not None:
        steps = _admitted(proof, steps, left, first, together or (lambda step: step.name))
        if not steps:
            return FoldReceipt(
                conversion=conversion, model=type(model).__name__, refused=tuple(left), revert=lambda: None
            )
        found = proof.float64([*first, *(s.edit for s in steps)])
    reason = failure(found)
    edits = [*first, *(s.edit for s in steps)]
    errors = None if reason else proof.own(edits)
    if errors is not None:
        reason = failure_in(proof.dtype, errors)
    if reason is not None:
        raise ConversionError(f"{conversion} is refused, nothing was changed: {reason}")
    editor = Editor(model)
    try:
        for edit in edits:
            edit(editor)
    except BaseException:
        editor.revert()
        raise
    said = [*notes, f"in float64 the outputs differ by {found.outputs:.1e} from the original's"]
    return FoldReceipt(
        conversion=conversion,
        model=type(model).__name__,
        changed=tuple(Change(name=s.name, what=s.what) for s in steps),
        refused=tuple(left),
        errors=errors,
        float64=found,
        notes=tuple(said),
        revert=editor.revert,
    )


def _admitted(
    proof: Proof, steps: list[Step], left: list[Refusal], first: Sequence[Edit], group: Callable[[Step], str]
) -> list[Step]:
    """The steps whose own proof holds; the others are noted with the reason."""
    groups: dict[str, list[Step]] = {}
    for step in steps:
        groups.setdefault(group(step), []).append(step)
    kept: list[Step] = []
    for members in groups.values():
        reason = failure(proof.float64([*first, *(s.edit for s in members)]))
        if reason is None:
            kept += members
        else:
            left += [Refusal(s.name, f"the proof failed: {reason}") for s in members]
    return kept


def widened_copy(model: nn.Module, edits: Sequence[Edit] = ()) -> nn.Module:
    """A float64 copy with some edits made."""
    made = twin(model, wide=True)
    editor = Editor(made)
    for edit in edits:
        edit(editor)
    return made


def finite(*tensors: Tensor) -> bool:
    """Whether all values are."""
    return all(bool(torch.isfinite(t).all()) for t in tensors)
