"""replace: other norms or another placement in a model that is to be trained on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from normkit.audit.find import Occurrence, find_norms
from normkit.audit.trace import trace
from normkit.convert.edit import Editor, dress
from normkit.convert.fold.plan import check_model
from normkit.convert.fold.proof import Example, Run, difference, run, twin
from normkit.convert.receipt import Change, ConversionError, Errors, Receipt, Refusal
from normkit.convert.replace.norms import CONVERTERS, Irreplaceable, Options
from normkit.convert.replace.placements import change_placement
from normkit.placement import Placement, known
from normkit.residual import Transformer

TARGETS = tuple(CONVERTERS)
"""What a norm can be replaced by; a placement's name is for `normkit.Transformer`."""


def replace(
    model: nn.Module,
    *example_args: Any,
    to: str | Placement,
    groups: int = 32,
    alpha: float = 0.5,
    process_group: Any = None,
    only: Collection[str] | None = None,
    **example_kwargs: Any,
) -> Receipt:
    """Replace norms (or the placement) of a model that is to be trained on; its outputs change.

    ========================  ==============================================  ==========================================
    ``to``                    replaces                                        by
    ========================  ==============================================  ==========================================
    ``"group_norm"``          batch norms                                     GroupNorm; of ``groups`` the largest
                                                                              number that divides the channels
    ``"sync_batch_norm"``     batch norms                                     SyncBatchNorm
    ``"batch_norm"``          SyncBatchNorms                                  what they were before
    ``"frozen_batch_norm"``   batch norms                                     their stored statistics, fixed
    ``"rms_norm"``            LayerNorms                                      RMSNorm of the same gain and bias
    ``"dynamic_tanh"``        LayerNorms, RMSNorms                            DynamicTanh of the same gain and bias
    a placement               the wiring of a `normkit.Transformer`           another one; weights stay where both
                                                                              wirings have them
    ========================  ==============================================  ==========================================

    Norms are found by what they compute. Parameters stay the same objects where they mean the same; mode, dtype,
    device and hooks are kept.

    Args:
        model: any module with values; changed in place.
        example_args, example_kwargs: what to call it with.
        to: see above.
        groups: the most groups that a GroupNorm may have.
        alpha: where DynamicTanh's scalar starts.
        process_group: of a SyncBatchNorm; None is the default group.
        only: names of norms to replace; all that fit by default.

    Returns:
        A receipt: what was replaced, what was left and why, by how much outputs and gradients changed. ``undo()`` puts
        the old modules back.

    Raises:
        ConversionError: the model cannot be run, before or after; nothing is changed.
        TypeError, ValueError: an unknown target, or another argument outside its domain.
    """
    example = check_model(model, example_args, example_kwargs)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"groups must be an integer >= 1; got {groups!r}")
    wiring = isinstance(to, Placement) or to in known()
    if not wiring and to not in CONVERTERS:
        raise ValueError(f"to must be one of {', '.join((*TARGETS, *known()))}; got {to!r}")
    if wiring and not isinstance(model, Transformer):
        raise TypeError(f"placement {to!r} is for a normkit.Transformer; got {type(model).__name__}")
    before = run(twin(model, wide=False), example, wide=False)
    editor = Editor(model)
    try:
        if wiring:
            assert isinstance(model, Transformer)
            made = _Made(*change_placement(editor, model, to))
        else:
            assert isinstance(to, str)
            made = _replace_norms(editor, model, example, to, Options(groups, alpha, process_group), only)
        if not made.changed:
            editor.revert()
        errors = _measure(model, example, before, editor) if made.changed else None
    except BaseException:
        editor.revert()
        raise
    notes = ("outputs change: train on",) if errors is not None and errors.original.worst() > 0 else ()
    return Receipt(
        conversion=f"replace, to {to if isinstance(to, str) else to.name}",
        model=type(model).__name__,
        changed=tuple(made.changed),
        refused=tuple(made.refused),
        errors=errors,
        notes=(*made.notes, *notes),
        revert=editor.revert,
    )


@dataclass
class _Made:
    changed: list[Change]
    refused: list[Refusal]
    notes: list[str]


def _measure(model: nn.Module, example: Example, before: Run, editor: Editor) -> Errors:
    after = run(twin(model, wide=False), example, wide=False)
    return Errors(original=difference(after, before, editor.touched))


def _replace_norms(
    editor: Editor, model: nn.Module, example: Example, to: str, options: Options, only: Collection[str] | None
) -> _Made:
    recorded = trace(model, example.args, example.kwargs)
    if recorded.error is not None:
        raise ConversionError(f"{type(model).__name__} raised: {recorded.error}") from recorded.error
    norms = find_norms(recorded)
    unknown = sorted(set(only or ()) - {n.name for n in norms})
    if unknown:
        raise ValueError(f"only names {', '.join(unknown)}; the norms are {', '.join(n.name for n in norms)}")
    made = _Made([], [], [])
    kinds, convert = CONVERTERS[to]
    for norm in norms:
        if norm.identification.kind not in kinds or (only is not None and norm.name not in only):
            continue
        shape = recorded.values[norm.calls[0].inputs[0]].shape
        try:
            what = _replace_one(editor, norm, shape, convert, options)
        except Irreplaceable as error:
            made.refused.append(Refusal(norm.name, str(error)))
        else:
            made.changed.append(Change(name=norm.name, what=what))
    return made


def _replace_one(
    editor: Editor, norm: Occurrence, shape: tuple[int, ...], convert: Callable[..., Any], options: Options
) -> str:
    if norm.module is None or not norm.name:
        raise Irreplaceable("it is written inline, or is the model itself: there is no place to put another module")
    if norm.identification.spec is None:
        raise Irreplaceable(f"no NormSpec describes it: {norm.identification.reason}")
    old = editor.model.get_submodule(norm.name)
    new, what = convert(old, norm.identification, shape, options)
    editor.set_module(norm.name, dress(new, old))
    return what
