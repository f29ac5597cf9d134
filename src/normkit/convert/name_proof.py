"""What new names do to a model: both ends built, where a config can build them, and run on the same inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.load import Loaded, ModelError, from_config, load, transformers
from normkit.convert import proof
from normkit.convert.checkpoint import CONFIG, DTYPES, Checkpoint
from normkit.convert.gain_proof import LIMIT, loaded_names
from normkit.convert.name_tables import STYLES
from normkit.convert.names import NameMap, Renamed
from normkit.convert.receipt import Difference, Errors, deviations, worst
from normkit.errors import message

_ARCHITECTURE = ("architectures", "model_type", "transformers_version", "_name_or_path", "auto_map")


class Unmeasured(Exception):
    """Why outputs were not compared; shown to the user."""


def measured(checkpoint: Checkpoint, made: NameMap, to: str) -> tuple[Errors | None, tuple[str, ...]]:
    """The model under the old names against the one under the new names, both in float32.

    Args:
        checkpoint: the source, with a config.
        made: the map.
        to: the target's naming.

    Returns:
        The differences of outputs, and of the gradients of all tensors that were only renamed (None where nothing was
        measured), and a note: why not, or what the difference holds besides.
    """
    try:
        source = _source(checkpoint)
        target, notes = _target(checkpoint, source, made, to)
        return _compared(source, target, made, checkpoint), notes
    except Unmeasured as why:
        return None, (f"outputs were not measured: {why}",)


def _source(checkpoint: Checkpoint) -> Loaded:
    if not checkpoint.path.is_dir() or not (checkpoint.path / CONFIG).is_file():
        raise Unmeasured(f"the source has no {CONFIG}, so no model can be built of it")
    if checkpoint.nbytes > LIMIT:
        raise Unmeasured(f"the files are larger than {LIMIT / 1e9:g} GB")
    try:
        loaded = load(str(checkpoint.path), device="cpu")
    except ModelError as error:
        raise Unmeasured(str(error)) from error
    report = loaded.report
    if report is not None and (report.missing or report.mismatched):
        raise Unmeasured(f"the files lack {(*report.missing, *report.mismatched)[0]} of the {CONFIG}'s model")
    loaded.model.float().eval()
    return loaded


def _target(checkpoint: Checkpoint, source: Loaded, made: NameMap, to: str) -> tuple[nn.Module, tuple[str, ...]]:
    """The model that reads the new names, filled."""
    config: Any = source.model.config
    notes: tuple[str, ...] = ()
    if to == "normkit":
        model = _ours(config)
    else:
        kind = config.model_type if to in STYLES else to.partition("/")[0]
        if kind not in transformers().CONFIG_MAPPING or to.partition("/")[2] not in ("", "torch"):
            raise Unmeasured(f"no model can be built here that reads {to}'s names")
        model = _theirs(config, kind)
        if kind != config.model_type:
            notes = (
                f"outputs: a {kind} model of the same sizes that loads the new file, against the source's; whatever "
                "else the two families do differently is in it",
            )
    _fill(model, made, checkpoint)
    return model, notes


def _ours(config: Any) -> nn.Module:
    from normkit.residual import Transformer
    from normkit.residual.transformer_weights import FAMILIES

    if config.model_type not in FAMILIES:
        raise Unmeasured(f"normkit's Transformer reads no config of type {config.model_type}")
    try:
        return Transformer(FAMILIES[config.model_type].config(config.to_dict())).eval()
    except ValueError as error:
        raise Unmeasured(str(error)) from error


def _theirs(config: Any, kind: str) -> nn.Module:
    left = _ARCHITECTURE if kind != config.model_type else ("model_type",)
    try:
        made = transformers().AutoConfig.for_model(kind, **{k: v for k, v in config.to_dict().items() if k not in left})
        return from_config(kind, made, "cpu").model.float()
    except (ModelError, TypeError, ValueError, AttributeError) as error:
        raise Unmeasured(f"no {kind} model can be built of {CONFIG}: {message(error)}") from error


def _fill(model: nn.Module, made: NameMap, checkpoint: Checkpoint) -> None:
    values = {name: t.tensor().float() for name, t in checkpoint.tensors.items() if t.dtype in DTYPES}
    known = replace(made, tensors=tuple(r for r in made.tensors if all(p.key in values for p in r.pieces)))
    new = known.apply(values)
    slots = model.state_dict(keep_vars=True)
    places = loaded_names(model, new)
    filled = {id(slots[name]) for name in places}
    lacking = [name for name, slot in slots.items() if slot.is_floating_point() and id(slot) not in filled]
    if lacking:
        raise Unmeasured(f"the target's model also has {lacking[0]} ({len(lacking)} such), which the new file lacks")
    for name, stored in places.items():
        if slots[name].shape != new[stored].shape:
            raise Unmeasured(f"{stored} has shape {list(new[stored].shape)}, the model's {list(slots[name].shape)}")
        slots[name].data.copy_(new[stored])


def _compared(source: Loaded, target: nn.Module, made: NameMap, checkpoint: Checkpoint) -> Errors:
    ours = loaded_names(source.model, checkpoint.tensors)
    theirs = loaded_names(target, [r.key for r in made.tensors])
    old = _run(source.model, source.kwargs, {stored: own for own, stored in ours.items()})
    new = _run(target, _inputs(target, source.kwargs), {stored: own for own, stored in theirs.items()})
    outputs = Difference(outputs=deviations(new[0], old[0]))
    plain: list[Renamed] = [r for r in made.tensors if r.plain and r.key in new[1] and r.pieces[0].key in old[1]]
    sizes = [g.abs().max() for r in plain if (g := old[1][r.pieces[0].key]) is not None and g.numel()]
    floor = 1e-3 * float(torch.stack(sizes).max()) if sizes else 0.0
    apart = [_apart(new[1][r.key], old[1][r.pieces[0].key], floor) for r in plain]
    return Errors(original=worst([outputs, *(Difference(gradients=a) for a in apart if a is not None)]))


def _apart(got: Tensor | None, expected: Tensor | None, floor: float) -> float | None:
    """A gradient's deviation over its largest entry, or over a share of the largest of all: some are only rounding."""
    if got is None or expected is None:
        return None if got is expected else torch.inf
    if got.shape != expected.shape:
        return torch.inf
    size = max(float(expected.abs().max()) if expected.numel() else 0.0, floor, 1e-300)
    return float((got.double() - expected.double()).abs().max()) / size if got.numel() else 0.0


def _inputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The source's inputs by the names that another model has for them."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(inputs)
    other = {"tokens": "input_ids", "mask": "attention_mask", "types": "token_type_ids"}
    named = {name: inputs[other.get(name, name)] for name in parameters if other.get(name, name) in inputs}
    if not named:
        raise Unmeasured(f"{type(model).__name__} takes none of {', '.join(inputs)}")
    return named


def _run(
    model: nn.Module, inputs: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The first output, and gradients by the files' names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    starts = {stored: parameters[own] for stored, own in names.items() if own in parameters}
    with torch.enable_grad():
        try:
            outputs = proof.floats_in(model(**inputs))[:1]
        except Exception as error:  # foreign code, with a config that was meant for another model
            raise Unmeasured(f"{type(model).__name__} raised: {message(error)}") from error
        if not outputs:
            raise Unmeasured(f"{type(model).__name__} returns no floating point tensor")
        found = torch.autograd.grad(outputs, list(starts.values()), [proof.direction(outputs[0])], allow_unused=True)
    return [outputs[0].detach()], dict(zip(starts, found, strict=True))
