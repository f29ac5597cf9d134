"""Apply a conversion of a model to a model folder: load it by its config, convert, write the tensors that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.audit.load import Loaded, ModelError, load
from normkit.convert.checkpoint import DTYPE_NAMES, Checkpoint, open_checkpoint, to_bytes
from normkit.convert.gain_proof import loaded_names
from normkit.convert.receipt import ConversionError, Receipt
from normkit.convert.stream import Output, copied, write_checkpoint


def convert_folder(
    source: str | Path,
    out: str | Path | None,
    change: Callable[[Loaded], Receipt],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Receipt:
    """Load a folder's model, change it in memory, and write a new folder in which only what changed differs.

    Args:
        source: a folder with a ``config.json`` and safetensors files.
        out: the new folder; None to write nothing.
        change: changes the loaded model in place and says how.
        progress: called with a word on what is being done.

    Raises:
        ConversionError: as `open_checkpoint` and `write_checkpoint`; no model can be built; the changed model has
            tensors that the config's model or the files have no place for.
    """
    checkpoint = open_checkpoint(source)
    if not checkpoint.path.is_dir():
        raise ConversionError(f"{source} is a file; give the folder with its config.json")
    try:
        loaded = load(str(checkpoint.path), device="cpu", progress=progress)
    except ModelError as error:
        raise ConversionError(str(error)) from error
    before = {name: t.detach().clone() for name, t in loaded.model.state_dict().items()}
    progress("converting")
    receipt = change(loaded)
    changed = _changed(checkpoint, loaded, before)
    if out is not None:
        outputs = [_output(checkpoint, name, changed.get(name)) for name in checkpoint.tensors]
        receipt.notes += write_checkpoint(checkpoint, out, outputs, progress=progress)
        receipt.notes += (f"{len(changed)} of {len(outputs)} tensors changed; written to {out}",)
    return receipt


def _changed(checkpoint: Checkpoint, loaded: Loaded, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names in the files to new values."""
    after = loaded.model.state_dict()
    places = loaded_names(loaded.model, checkpoint.tensors)
    gone, new = [n for n in before if n not in after], [n for n in after if n not in before]
    if gone or new:
        what = f"no longer has {gone[0]!r}" if gone else f"also has {new[0]!r}"
        raise ConversionError(
            f"the converted model {what} ({len(gone) + len(new)} such), so its config.json cannot build it: convert it "
            "in Python and save it with your own code"
        )
    found: dict[str, Tensor] = {}
    written = {after[name].data_ptr() for name in places if after[name].numel()}
    for name, tensor in after.items():
        if torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype:
            continue
        place = places.get(name)
        if place is None and tensor.data_ptr() in written:
            continue  # a tied tensor, stored under its other name
        stored = checkpoint.tensors.get(place or "")
        if stored is None or stored.shape != tuple(tensor.shape) or stored.dtype != DTYPE_NAMES.get(tensor.dtype):
            raise ConversionError(f"{name!r} changed, and the files hold it in another form; nothing was written")
        found[stored.name] = tensor
    return found


def _output(checkpoint: Checkpoint, name: str, value: Tensor | None) -> Output:
    same = copied(checkpoint.tensors[name])
    if value is None:
        return same

    def pieces() -> Iterator[bytes]:
        yield to_bytes(value.detach())

    return replace(same, pieces=pieces)


def fold_folder(source: str | Path, out: str | Path | None, **how: Any) -> Receipt:
    """`normkit.convert.fold.fold` on a folder: gains and biases of norms into the linear maps that follow.

    Raises:
        ConversionError: as `convert_folder` and the fold itself.
    """
    from normkit.convert.fold import fold

    return convert_folder(source, out, lambda loaded: fold(loaded.model, *loaded.args, **loaded.kwargs), **how)


def recalibrate_folder(source: str | Path, out: str | Path | None, batches: list[Any], **how: Any) -> Receipt:
    """`normkit.convert.recalibrate` on a folder: running statistics computed again over given batches.

    Raises:
        ConversionError: as `convert_folder` and the recalibration itself.
    """
    from normkit.convert.recalibrate import recalibrate

    return convert_folder(source, out, lambda loaded: recalibrate(loaded.model, batches), **how)
