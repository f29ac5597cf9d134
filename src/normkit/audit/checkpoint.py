"""Weights in files, read without running anything: safetensors, and what ``torch.load`` reads with ``weights_only``.

A training script nests its state dict in whatever it likes (``state_dict``, ``model``), and puts what wraps its model
before the names (``module.``, a Lightning attribute). Which part of a file, and behind which prefix, is decided by what
the model's own names fit.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
SUFFIXES = (".safetensors", *PICKLED, ".gguf")
STANDARD = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""The names that ``from_pretrained`` looks for in a folder."""

_WRAPPING = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"])
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)")


class CheckpointError(Exception):
    """A file of weights cannot be used; the message says why, in one line."""


def files_in(folder: Path) -> list[Path]:
    """The files of weights in a folder."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def files_of(path: Path) -> list[Path]:
    """The files that belong together with one: the other shards, if it is one of several.

    Raises:
        CheckpointError: a shard is not there.
    """
    shard = _SHARD.fullmatch(path.stem)
    if shard is None:
        return [path]
    together = [p for p in files_in(path.parent) if (m := _SHARD.fullmatch(p.stem)) and m.groups() == shard.groups()]
    if len(together) != int(shard[2]):
        raise CheckpointError(f"{path} is one of {shard[2]} shards, of which {len(together)} are there; get the others")
    return together


def read(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Every tensor of some files, by its dotted way through what the files nest it in.

    Raises:
        CheckpointError: a file that cannot be read, or that holds pickled code.
    """
    found: dict[str, Tensor] = {}
    for path in paths:
        found |= dict(named for named in _flat(_contents(path)) if named[0])  # a lone tensor is nobody's
    if not found:
        raise CheckpointError(f"{', '.join(p.name for p in paths)} holds no tensors by name")
    return found


def _contents(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"cannot read the weights in {path}: {error}; download the file again") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" ({name[1]})" if name else ""
        raise CheckpointError(
            f"{path} holds pickled code{what}, which is not run: ask for the weights as safetensors, or save "
            "model.state_dict() alone"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if "TorchScript" in str(error):
            raise CheckpointError(f"{path} is a TorchScript program, which is not run: save its state dict") from error
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"cannot read the weights in {path}: {reason}; download the file again") from error


def _flat(value: Any, lead: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested mappings, named by the keys that lead to them; what wraps modules is left out of the names."""
    if isinstance(value, Tensor):
        yield ".".join(part for part in lead.split(".") if part not in _WRAPPING), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{lead}.{key}" if lead else str(key))


def fitted(tensors: Mapping[str, Tensor], wanted: Iterable[str], base: str = "") -> dict[str, Tensor]:
    """The tensors that are a model's, under names without what was put before them.

    Args:
        tensors: what `read` gives.
        wanted: the names in the model's state dict.
        base: what the model calls its own base model, which may have been saved without its head.

    Raises:
        CheckpointError: none of the names fits.
    """
    names = set(wanted)
    if base:
        names |= {name.removeprefix(f"{base}.") for name in names}
    votes: Counter[str] = Counter()
    for key in tensors:
        parts = key.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in names:
                votes["".join(f"{part}." for part in parts[:i])] += 1
    if not votes:
        raise CheckpointError(
            f"none of its tensors fits the model: it has {', '.join(list(tensors)[:3])}, ...; the model has "
            f"{', '.join(sorted(names)[:3])}, ..."
        )
    lead, _ = votes.most_common(1)[0]  # of several that fit as well the first: averages come after the weights
    return {key.removeprefix(lead): tensor for key, tensor in tensors.items() if key.startswith(lead)}
