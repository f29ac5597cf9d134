"""A safetensors checkpoint, one file or sharded, read by explicit ranges: nothing is mapped, nothing is kept."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from normkit.convert.receipt import ConversionError

CONFIG, OLD_CONFIG = "config.json", "config.source.json"
"""A config, and one that no longer describes the tensors beside it."""
CHUNK = 2**23
"""Bytes held at a time."""
_HEADER_LIMIT = 100_000_000  # the format's own
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BOOL": 8, "I8": 8, "U8": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes whose values can be converted; tensors of any other are copied byte for byte."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as it lies in a file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its bytes, from the start of the file."""
    nbytes: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _BITS[self.dtype] // 8

    def chunks(self) -> Iterator[bytearray]:
        """Its bytes, `CHUNK` at a time."""
        with open(self.file, "rb", buffering=0) as file:
            for first in range(0, self.nbytes, CHUNK):
                yield read_exactly(file.fileno(), self.start + first, min(CHUNK, self.nbytes - first), self.file)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Iterator[bytes]:
        """Its elements through an elementwise function, a chunk at a time."""
        for chunk in self.chunks():
            yield to_bytes(change(torch.frombuffer(chunk, dtype=DTYPES[self.dtype])))

    def tensor(self) -> Tensor:
        """All of it."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        with open(self.file, "rb", buffering=0) as file:
            data = read_exactly(file.fileno(), self.start, self.nbytes, self.file)
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).reshape(self.shape)


def to_bytes(tensor: Tensor) -> bytes:
    """The elements in order, little-endian as the format wants."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def read_exactly(descriptor: int, start: int, length: int, file: Path) -> bytearray:
    """Bytes of a range; ConversionError where the file ends before it does."""
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        read = os.preadv(descriptor, [view[done:]], start + done)
        if not read:
            raise ConversionError(f"{file} ended at byte {start + done} while it was read; fetch it again")
        done += read
    return data


@dataclass(kw_only=True)
class Checkpoint:
    """The tensors of one file or of all shards."""

    path: Path
    """What was named: a folder or a file."""
    files: dict[str, list[str]]
    """File name to its tensors' names in the order of their bytes."""
    tensors: dict[str, Stored]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """File name to the metadata of its header."""
    index: dict[str, Any] | None = None
    """The index file's content, where there is one."""
    index_name: str = ""

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self.tensors[name].file.name


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers of a safetensors file, or of a folder with one or with an index and its shards.

    Raises:
        ConversionError: there is none; an index that does not fit; shards missing, truncated or corrupt.
    """
    path = Path(path)
    try:
        if path.is_file():
            return _opened(path, [path])
        if not path.is_dir():
            raise ConversionError(f"no file or folder {path}; give a .safetensors file or a folder with some")
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            raise ConversionError(f"{path} holds {len(indexes)} indexes ({_listed(indexes)}); keep one")
        return _indexed(path, indexes[0]) if indexes else _opened(path, [_only_file(path)])
    except OSError as error:
        raise ConversionError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


def _only_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        others = sorted(p for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        hint = f"; {others[0].name} is pickled: save it as safetensors first" if others else ""
        raise ConversionError(f"{folder} holds no .safetensors file{hint}")
    usual = folder / "model.safetensors"
    if len(found) > 1 and usual not in found:
        raise ConversionError(
            f"{folder} holds {len(found)} .safetensors files and no index ({_listed(found)}); restore "
            "model.safetensors.index.json, or name one file"
        )
    return usual if usual in found else found[0]


def _indexed(folder: Path, index: Path) -> Checkpoint:
    content = _json(index.read_bytes(), f"{index} is no index")
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise ConversionError(f"{index} has no weight_map of names to files; restore it")
    if not isinstance(content.get("metadata"), dict | None):
        raise ConversionError(f"{index} has metadata that is no object; restore it")
    shards = sorted(set(places.values()))
    for shard in shards:
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise ConversionError(f"{index} names the shard {shard!r}, which is no plain file name; restore it")
    missing = [s for s in shards if not (folder / s).is_file()]
    if missing:
        raise ConversionError(f"{folder} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:3])}")
    made = _opened(folder, [folder / s for s in shards])
    for name, shard in places.items():
        if name not in made.tensors or made.file_of(name) != shard:
            raise ConversionError(f"{index} says that {shard} holds {name!r}, and it does not; restore the index")
    unlisted = [n for n in made.tensors if n not in places]
    if unlisted:
        raise ConversionError(f"{index} does not list {unlisted[0]!r} ({len(unlisted)} in all); restore the index")
    made.index, made.index_name = content, index.name
    return made


def _opened(path: Path, files: list[Path]) -> Checkpoint:
    made = Checkpoint(path=path, files={}, tensors={})
    for file in files:
        tensors, metadata = read_header(file)
        for stored in tensors:
            if stored.name in made.tensors:
                raise ConversionError(f"{stored.name!r} is in {made.file_of(stored.name)} and in {file.name}")
            made.tensors[stored.name] = stored
        made.files[file.name] = [t.name for t in tensors]
        made.metadata[file.name] = metadata
    if not made.tensors:
        raise ConversionError(f"{path} holds no tensors")
    return made


def read_header(file: Path) -> tuple[list[Stored], dict[str, str]]:
    """The tensors of one file in the order of their bytes, and its metadata; every size is checked.

    Raises:
        ConversionError: the file is truncated, or no valid safetensors file.
    """
    size = file.stat().st_size
    with open(file, "rb", buffering=0) as handle:
        if size < 8:
            raise ConversionError(f"{file} is truncated: it has {size} bytes, too few for a header; fetch it again")
        length = int.from_bytes(read_exactly(handle.fileno(), 0, 8, file), "little")
        if length > _HEADER_LIMIT:
            raise ConversionError(f"{file} is corrupt or no safetensors file: its header would be {length} bytes")
        if length > size - 8:
            raise ConversionError(
                f"{file} is truncated or no safetensors file: a header of {length} bytes in a file of {size}"
            )
        header = _json(bytes(read_exactly(handle.fileno(), 8, length, file)), f"{file} is corrupt: its header is none")
    if not isinstance(header, dict):
        raise ConversionError(f"{file} is corrupt: its header is a {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ConversionError(f"{file} is corrupt: its metadata must map text to text")
    tensors = sorted((_stored(file, n, e, 8 + length) for n, e in header.items()), key=lambda t: (t.start, t.nbytes))
    end = 8 + length
    for stored in tensors:
        if stored.start != end:
            raise ConversionError(f"{file} is corrupt: {stored.name!r} starts at byte {stored.start}, not at {end}")
        end += stored.nbytes
    if end > size:
        raise ConversionError(f"{file} is truncated: it has {size} of {end} bytes; fetch it again")
    if end < size:
        raise ConversionError(f"{file} is corrupt: {size - end} bytes follow the last tensor; fetch it again")
    return tensors, metadata


def _stored(file: Path, name: str, entry: Any, data: int) -> Stored:
    wrong = ConversionError(f"{file} is corrupt: the entry of {name!r} is not a dtype, a shape and two offsets")
    if not isinstance(entry, dict):
        raise wrong
    dtype, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise wrong
    nbytes = offsets[1] - offsets[0]
    if dtype not in _BITS:
        raise ConversionError(f"{file} holds {name!r} as {dtype}, a dtype that is not known here")
    needed = math.prod(shape) * _BITS[dtype]
    if nbytes * 8 != needed:
        raise ConversionError(f"{file} is corrupt: {name!r} ({dtype} {shape}) has {nbytes} bytes, not {needed / 8:g}")
    return Stored(name, file, dtype, tuple(shape), data + offsets[0], nbytes)


def _whole(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)


def _json(data: bytes, complaint: str) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{complaint}: {str(error)[:120]}; fetch it again") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _listed(paths: list[Path]) -> str:
    return ", ".join(p.name for p in paths[:3]) + (", ..." if len(paths) > 3 else "")
