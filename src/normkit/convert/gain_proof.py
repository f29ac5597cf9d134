"""What a conversion of gains does to the model's outputs, measured on a probe."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.load import ModelError, load
from normkit.convert.checkpoint import Checkpoint
from normkit.convert.gain_evidence import OFFSETS, Convention, shift
from normkit.convert.receipt import Difference, Errors, deviations

LIMIT = 2 * 10**9
"""Bytes of a checkpoint whose model is still built: a probe needs all of it in memory, in float32."""
Known = Mapping[str, tuple[Convention | None, Convention | None]]
"""A gain's tensor to how it is stored and what the model reads."""


def measured(
    checkpoint: Checkpoint, gains: Known, shifts: Mapping[str, float]
) -> tuple[Errors | None, tuple[str, ...]]:
    """The config's model with the gains as stored before and after, each read in its own convention.

    Returns:
        The difference of outputs in float32 (None where it was not measured), and notes: why not, or by how much the
        outputs of the model differ if it loads the old file as it is.
    """
    if not any(reads for _, reads in gains.values()):
        return None, ("outputs were not measured: no model can be built from a config",)
    if checkpoint.nbytes > LIMIT:
        return None, (f"outputs were not measured: the files are larger than {LIMIT / 1e9:g} GB",)
    try:
        loaded = load(str(checkpoint.folder), device="cpu") if checkpoint.path.is_dir() else None
    except ModelError as error:
        return None, (f"outputs were not measured: {error}",)
    if loaded is None:
        return None, ("outputs were not measured: one file was named, not the folder with its config",)
    model = loaded.model.float()
    tensors = model.state_dict(keep_vars=True)
    slots = {name: tensors[own] for own, name in loaded_names(model, gains).items()}
    known = {n: (OFFSETS[s], OFFSETS[r]) for n, (s, r) in gains.items() if n in slots and s and r}
    values = {name: checkpoint.tensors[name].tensor() for name in known}

    def outputs(after: bool, *, as_read: bool = False) -> list[Tensor]:
        for name, (offset, read) in known.items():
            stored = values[name]
            if after and name in shifts:
                stored, offset = shift(stored, shifts[name]), offset - shifts[name]
            exact = stored.double() + (0.0 if as_read else offset - read)
            with torch.no_grad():
                slots[name].copy_(exact)
        return _run(model, loaded.args, loaded.kwargs)

    before = outputs(False)
    errors = Errors(original=Difference(outputs=deviations(outputs(True), before)))
    wrong = deviations(outputs(False, as_read=True), before)
    notes = (f"a model that loads the old file as it is: outputs off by {wrong:.1e}",) if wrong else ()
    return errors, notes


def loaded_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The model's own names of tensors to their names in the files, as transformers would load them.

    A checkpoint may lack the prefix of a model with a head, or be in an older naming.
    """
    own = model.state_dict()
    prefix = str(getattr(model, "base_model_prefix", ""))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, apply_renamings

        renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]  # type: ignore[arg-type]
    except (ImportError, AttributeError, TypeError):  # another library's model, or another version
        renamings, apply_renamings = [], None
    found: dict[str, str] = {}
    for name in stored:
        renamed = name if apply_renamings is None else apply_renamings(name, renamings)
        for spelling in (name, renamed, f"{prefix}.{renamed}", renamed.removeprefix(f"{prefix}.")):
            if spelling in own:
                found.setdefault(spelling, name)
                break
    return found


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = model(*args, **kwargs)
    leaves = tree_leaves(dict(result) if isinstance(result, dict) else result)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
