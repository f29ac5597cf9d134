"""Apply a conversion of a model to a model folder: load it by its config, convert, write the tensors that changed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.load import Loaded, ModelError, from_config, load
from normkit.convert.checkpoint import CONFIG, DTYPE_NAMES, Checkpoint, open_checkpoint, to_bytes
from normkit.convert.gain_proof import loaded_names
from normkit.convert.receipt import ConversionError, Receipt
from normkit.convert.stream import Output, copied, write_checkpoint

_TIES = "tie_word_embeddings"


@dataclass
class Folder:
    """A folder's files, its model, and the model's tensors before anything is changed."""

    checkpoint: Checkpoint
    loaded: Loaded
    before: dict[str, Tensor] = field(init=False)
    places: dict[str, str] = field(init=False)
    """The model's names of tensors to the files'."""

    def __post_init__(self) -> None:
        self.before = {name: t.detach().clone() for name, t in self.loaded.model.state_dict().items()}
        self.places = loaded_names(self.loaded.model, self.checkpoint.tensors)

    @property
    def lacking(self) -> tuple[str, ...]:
        """What the model has and the files do not give it."""
        report = self.loaded.report
        return () if report is None else (*report.missing, *report.mismatched)

    def place(self, name: str) -> tuple[str, str]:
        """(name, file) of a tensor that the files do not have yet: beside its module's others."""
        owner, _, leaf = name.rpartition(".")
        for own, stored in self.places.items():
            if own.startswith(f"{owner}."):
                depth = own.removeprefix(f"{owner}.").count(".") + 1
                return f"{stored.rsplit('.', depth)[0]}.{leaf}", self.checkpoint.file_of(stored)
        return name, next(reversed(self.checkpoint.files))


def open_folder(source: str | Path, progress: Callable[[str], None] = lambda _: None) -> Folder:
    """Read a folder's headers and load its model.

    Raises:
        ConversionError: as `open_checkpoint`; no folder, or no model can be built.
    """
    checkpoint = open_checkpoint(source)
    if not checkpoint.path.is_dir():
        raise ConversionError(f"{source} is a file; give the folder with its {CONFIG}")
    try:
        return Folder(checkpoint, load(str(checkpoint.path), device="cpu", progress=progress))
    except ModelError as error:
        raise ConversionError(str(error)) from error


def convert_folder(
    source: str | Path,
    out: str | Path | None,
    change: Callable[[Loaded], Receipt],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Receipt:
    """Load a folder's model, change it in memory, and write a new folder in which only what changed differs.

    A head that was untied is stored on its own, and ``config.json`` says so.

    Args:
        source: a folder with a ``config.json`` and safetensors files.
        out: the new folder; None to write nothing.
        change: changes the loaded model in place and says how.
        progress: called with a word on what is being done.

    Raises:
        ConversionError: as `open_checkpoint` and `write_checkpoint`; no model can be built; the changed model has
            tensors that the config's model or the files have no place for.
    """
    folder = open_folder(source, progress)
    progress("converting")
    receipt = change(folder.loaded)
    if folder.lacking:
        count, first = len(folder.lacking), folder.lacking[0]
        receipt.notes += (f"the files lack {count} tensors of the model, such as {first}: they had random values",)
    _check_names(folder)
    edits = edits_of(folder)
    written = {CONFIG: _untied(folder)} if edits.added else {}
    if out is not None:
        outputs = edits.outputs(folder.checkpoint)
        receipt.notes += write_checkpoint(folder.checkpoint, out, outputs, written=written, progress=progress)
        receipt.notes += (
            f"{len(edits.changed) + len(edits.added)} of {len(outputs)} tensors changed; written to {out}",
        )
    return receipt


def _check_names(folder: Folder) -> None:
    before, after = folder.before, folder.loaded.model.state_dict()
    gone, new = [n for n in before if n not in after], [n for n in after if n not in before]
    if gone or new:
        what = f"no longer has {gone[0]!r}" if gone else f"also has {new[0]!r}"
        raise ConversionError(
            f"the converted model {what} ({len(gone) + len(new)} such), so its {CONFIG} cannot build it: convert it "
            "in Python and save it with your own code"
        )


@dataclass
class Edits:
    """How a converted model's tensors differ from the files', by their names there."""

    changed: dict[str, Tensor] = field(default_factory=dict)
    added: dict[str, tuple[Tensor, str]] = field(default_factory=dict)
    """With the file that is to hold it."""
    gone: set[str] = field(default_factory=set)

    def outputs(self, checkpoint: Checkpoint) -> list[Output]:
        """Every tensor of the new checkpoint."""
        kept = (t for name, t in checkpoint.tensors.items() if name not in self.gone)
        made = [_output(copied(t), self.changed.get(t.name)) for t in kept]
        for name, (tensor, file) in self.added.items():
            size = tensor.numel() * tensor.element_size()
            new = Output(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), size, file, lambda: iter(()))
            made.append(_output(new, tensor))
        return made


def _output(output: Output, value: Tensor | None) -> Output:
    if value is None:
        return output

    def pieces() -> Iterator[bytes]:
        yield to_bytes(value.detach())

    return replace(output, pieces=pieces)


def edits_of(folder: Folder) -> Edits:
    """What a conversion changed in a folder's model, found by comparing tensors.

    Raises:
        ConversionError: a tensor changed that the files do not hold, or hold in another shape or dtype.
    """
    before, after = folder.before, folder.loaded.model.state_dict()
    edits = Edits(gone={place for name, place in folder.places.items() if name not in after})
    stored_at = {after[name].data_ptr() for name in folder.places if name in after and after[name].numel()}
    for name, tensor in after.items():
        was, place = before.get(name), folder.places.get(name)
        if place is not None:
            if was is None or not _same(tensor, was):
                _check_form(name, tensor, folder.checkpoint, place)
                edits.changed[place] = tensor
        elif name in folder.lacking:
            if was is None or not _same(tensor, was):
                raise ConversionError(
                    f"{name!r} would be changed, and the files lack it; complete the checkpoint first"
                )
        elif tensor.data_ptr() not in stored_at:  # new, or no longer tied to one that is stored
            if tensor.dtype not in DTYPE_NAMES:
                raise ConversionError(f"{name!r} is new and {tensor.dtype}, which is not written here")
            stored, file = folder.place(name)
            edits.added[stored] = tensor, file
    return edits


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _check_form(name: str, tensor: Tensor, checkpoint: Checkpoint, place: str) -> None:
    stored, dtype = checkpoint.tensors[place], DTYPE_NAMES.get(tensor.dtype)
    if stored.dtype != dtype:
        raise ConversionError(
            f"{name!r} would be changed: the files hold it as {stored.dtype}, and its model has it as {dtype}, so it "
            f"would be rounded; store all weights in one dtype, and name it in {CONFIG}"
        )
    if stored.shape != tuple(tensor.shape):
        raise ConversionError(
            f"{name!r} would be changed: the files hold it as {list(stored.shape)}, and its model as "
            f"{list(tensor.shape)}; save the model once with save_pretrained, and convert that"
        )


def _untied(folder: Folder) -> bytes:
    """The config's text for a model whose head is no longer tied.

    Raises:
        ConversionError: a model that is built by it is tied all the same.
    """
    values = json.loads((folder.checkpoint.path / CONFIG).read_text(encoding="utf-8"))
    values[_TIES] = False
    model: Any = folder.loaded.model
    try:
        config = type(model.config).from_dict(values)
        fresh = from_config(folder.loaded.name, config, "meta").model
    except ModelError as error:
        raise ConversionError(str(error)) from error
    for names in _tied(fresh):
        if len({model.get_parameter(name).data_ptr() for name in names}) > 1:
            raise ConversionError(
                f"{CONFIG} would tie {names[0]} to {names[1]} again on loading, and {_TIES} does not change that: fold "
                "in Python and save the model with your own code"
            )
    return json.dumps(values, indent=2).encode() + b"\n"


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def fold_folder(source: str | Path, out: str | Path | None, *, untie: bool = False, **how: Any) -> Receipt:
    """`normkit.convert.fold.fold` on a folder: gains and biases of norms into the linear maps that follow.

    A config cannot say that a map has got a bias, so a norm before one without keeps its own.

    Raises:
        ConversionError: as `convert_folder` and the fold itself.
    """
    from normkit.convert.fold import fold

    def change(made: Loaded) -> Receipt:
        return fold(made.model, *made.args, untie=untie, new_biases=False, **made.kwargs)

    return convert_folder(source, out, change, **how)


def recalibrate_folder(source: str | Path, out: str | Path | None, batches: list[Any], **how: Any) -> Receipt:
    """`normkit.convert.recalibrate` on a folder: running statistics computed again over given batches.

    Raises:
        ConversionError: as `convert_folder` and the recalibration itself.
    """
    from normkit.convert.recalibrate import recalibrate

    return convert_folder(source, out, lambda loaded: recalibrate(loaded.model, batches), **how)
