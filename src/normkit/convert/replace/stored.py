"""replace on a model folder: no config says what norms were replaced by, so a recipe beside the tensors does."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normkit.audit.load import ModelError, from_config, transformers
from normkit.convert.checkpoint import CONFIG, OLD_CONFIG, Checkpoint, open_checkpoint
from normkit.convert.folder import edits_of, open_folder
from normkit.convert.gain_proof import loaded_names
from normkit.convert.receipt import ConversionError, Receipt
from normkit.convert.replace.core import replace
from normkit.convert.stream import write_checkpoint
from normkit.errors import message

RECIPE = "normkit.json"
"""The file that says what `replace_folder` did: ``to``, ``groups``, ``alpha`` and the names of the norms."""
_KEYS = {"to", "groups", "alpha", "only"}


def replace_folder(
    source: str | Path,
    out: str | Path | None,
    *,
    to: str,
    groups: int = 32,
    alpha: float = 0.5,
    only: Collection[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Receipt:
    """`normkit.convert.replace` on a folder, for further training with `load_replaced`.

    The new folder holds the tensors of the new model, a recipe (``normkit.json``), and the config as
    ``config.source.json``: under its own name it would build the old norms without a word.

    Args:
        source: a folder with a ``config.json`` and safetensors files.
        out: the new folder; None to say only what would be done and by how much outputs change.
        to, groups, alpha, only: as in `replace`.
        progress: called with a word on what is being done.

    Raises:
        ConversionError: as `open_checkpoint`, `write_checkpoint` and `replace`; no norm was replaced.
    """
    folder = open_folder(source, progress)
    progress("replacing")
    model, args, kwargs = folder.loaded.model, folder.loaded.args, folder.loaded.kwargs
    try:
        receipt = replace(model, *args, to=to, groups=groups, alpha=alpha, only=only, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConversionError(str(error)) from error
    if out is None:
        return receipt
    if not receipt.changed:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in receipt.refused[:3])
        raise ConversionError(f"no norm can be replaced by {to!r}{f' ({reasons})' if reasons else ''}; nothing written")
    recipe = {"to": to, "groups": groups, "alpha": alpha, "only": [c.name for c in receipt.changed]}
    receipt.notes += write_checkpoint(
        folder.checkpoint,
        out,
        edits_of(folder).outputs(folder.checkpoint),
        renamed={CONFIG: OLD_CONFIG},
        written={RECIPE: json.dumps({"replace": recipe}, indent=2).encode() + b"\n"},
        progress=progress,
    )
    receipt.notes += (
        f"{CONFIG} cannot say what was replaced, so it becomes {OLD_CONFIG}: load the new model with "
        f"normkit.convert.load_replaced({str(out)!r})",
    )
    return receipt


def load_replaced(folder: str | Path) -> nn.Module:
    """The model of a folder that `replace_folder` (``normkit convert replace``) wrote, in eval mode.

    Args:
        folder: with ``normkit.json``, ``config.source.json`` and safetensors files.

    Raises:
        ConversionError: it is no such folder, or its files do not fit the model that its recipe builds.
    """
    folder = Path(folder)
    recipe = _recipe(folder)
    checkpoint = open_checkpoint(folder)
    try:
        config = transformers().AutoConfig.from_pretrained(folder / OLD_CONFIG)
        loaded = from_config(str(folder), config, "cpu")
        receipt = replace(loaded.model, *loaded.args, **recipe, **loaded.kwargs)
    except (ModelError, TypeError, ValueError, OSError) as error:
        raise ConversionError(f"{folder} cannot be built again: {message(error)}") from error
    if len(receipt.changed) != len(recipe["only"]):
        first = receipt.refused[0]
        raise ConversionError(f"{folder} cannot be built again: {first.name} is not replaced here: {first.reason}")
    _fill(loaded.model, checkpoint)
    return loaded.model


def _recipe(folder: Path) -> dict[str, Any]:
    path = folder / RECIPE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read ({error}); give a folder of normkit convert replace") from error
    recipe = content.get("replace") if isinstance(content, dict) else None
    if not isinstance(recipe, dict) or set(recipe) != _KEYS or not isinstance(recipe["only"], list):
        raise ConversionError(f"{path} has no recipe with {', '.join(sorted(_KEYS))}; convert the source again")
    return recipe


def _fill(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load every tensor in its stored dtype; what is tied stays tied."""
    from safetensors import safe_open

    slots = model.state_dict(keep_vars=True)
    places = loaded_names(model, checkpoint.tensors)
    filled = {id(slots[name]) for name in places}
    lacking = [name for name, slot in slots.items() if id(slot) not in filled]
    if lacking:
        raise ConversionError(f"{checkpoint.path} lacks {lacking[0]!r} ({len(lacking)} such); convert the source again")
    for file in checkpoint.files:
        with safe_open(checkpoint.folder / file, "pt") as tensors:
            for name, stored in places.items():
                if checkpoint.file_of(stored) != file:
                    continue
                value: torch.Tensor = tensors.get_tensor(stored)
                if value.shape != slots[name].shape:
                    raise ConversionError(
                        f"{stored!r} has shape {list(value.shape)}, and {name!r} needs {list(slots[name].shape)}"
                    )
                slots[name].data = value
