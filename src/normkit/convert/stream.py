"""Write a converted checkpoint to a new folder, whole or not at all, without ever holding a tensor.

The folder appears under its name by one rename, when everything in it is on the disk. Until then it is a hidden
sibling whose name says what it is; a run that was killed leaves that behind, and the next one to the same place
removes it. The source is only read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normkit.convert.checkpoint import CHUNK, DTYPES, Checkpoint, Stored, read_exactly, to_bytes
from normkit.convert.receipt import ConversionError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Output:
    """One tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    """The name of the file that is to hold it."""
    pieces: Callable[[], Iterator[bytes | bytearray]] = field(repr=False)
    """() -> its bytes, a little at a time."""


def copied(stored: Stored, name: str | None = None) -> Output:
    """A tensor as it is, bit for bit, under its own name or another."""
    return Output(name or stored.name, stored.dtype, stored.shape, stored.nbytes, stored.file.name, stored.chunks)


@dataclass(frozen=True)
class Part:
    """A stored matrix (or vector) as a source of rows: turned over, or one of several equal parts of its outputs."""

    stored: Stored
    transposed: bool = False
    part: tuple[int, int] = (0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it gives."""
        shape = self.stored.shape[::-1] if self.transposed else self.stored.shape
        return (shape[0] // self.part[1], *shape[1:])

    def block(self, first: int, last: int, columns: slice) -> Any:
        """Some of its rows and columns, as a tensor."""
        import torch

        width = self.stored.shape[-1] if len(self.stored.shape) == 2 else 1
        offset = self.part[0] * self.shape[0]
        rows, cols = (first + offset, last + offset), (columns.start, columns.stop)
        if self.transposed:
            rows, cols = cols, rows
        size, dtype = self.stored.itemsize, DTYPES[self.stored.dtype]
        with open(self.stored.file, "rb", buffering=0) as file:

            def read(start: int, count: int) -> bytearray:
                return read_exactly(file.fileno(), self.stored.start + start * size, count * size, self.stored.file)

            if cols == (0, width):
                data = read(rows[0] * width, (rows[1] - rows[0]) * width)
            else:
                data = bytearray().join(read(row * width + cols[0], cols[1] - cols[0]) for row in range(*rows))
        made = torch.frombuffer(data, dtype=dtype).reshape(rows[1] - rows[0], cols[1] - cols[0])
        return made.T if self.transposed else made


def assembled(name: str, file: str, parts: Sequence[Part], *, transposed: bool = False) -> Output:
    """Parts stacked by their outputs, then turned over if asked; read and written in panels."""
    import torch

    head = parts[0]
    vector = len(head.shape) == 1
    heights = [p.shape[0] for p in parts]
    rows, width = sum(heights), 1 if vector else head.shape[1]
    panel = max(1, CHUNK // max(1, (rows if transposed else width) * head.stored.itemsize))

    def pieces() -> Iterator[bytes | bytearray]:
        if transposed:
            for start in range(0, width, panel):
                columns = slice(start, min(start + panel, width))
                yield to_bytes(torch.cat([p.block(0, p.shape[0], columns) for p in parts]).T)
            return
        for part, height in zip(parts, heights, strict=True):
            for start in range(0, height, panel):
                yield to_bytes(part.block(start, min(start + panel, height), slice(0, width)))

    shape = (rows,) if vector else (width, rows) if transposed else (rows, width)
    return Output(name, head.stored.dtype, shape, rows * width * head.stored.itemsize, file, pieces)


def write_checkpoint(
    source: Checkpoint,
    out: str | Path,
    outputs: Sequence[Output],
    *,
    metadata: Mapping[str, Mapping[str, str]] | None = None,
    renamed: Mapping[str, str] | None = None,
    written: Mapping[str, bytes] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Write tensors, and copy the folder's other files, to a new folder that appears whole or not at all.

    Args:
        source: where the tensors come from; never written to.
        out: the new folder.
        outputs: every tensor of the new checkpoint.
        metadata: file name to what its header's metadata is to gain.
        renamed: other files that are to have another name in the new folder.
        written: other files by name with their whole content, new or instead of the source's.
        progress: called with a word on what is being done.

    Returns:
        What was not copied, with the reason, one line each.

    Raises:
        ConversionError: the folder exists, is the source or lies in it, cannot be made, or the disk is full. Nothing
            is left of it then.
    """
    out = Path(out)
    _check_outputs(outputs)
    _check_place(source, out)
    others, left = _other_files(source)
    needed = sum(o.nbytes for o in outputs) + sum(p.stat().st_size for p in others.values())
    with _new_folder(out, needed) as folder:
        for name, path in others.items():
            if name not in (written or {}):
                _copy(path, folder / (renamed or {}).get(name, name))
        for name, content in (written or {}).items():
            _write_whole(folder / name, content)
        by_file: dict[str, list[Output]] = {name: [] for name in source.files}
        for output in outputs:
            by_file[output.file].append(output)
        for name, tensors in by_file.items():
            if tensors:
                progress(f"writing {name}")
                _write_file(folder / name, tensors, source.metadata[name] | dict((metadata or {}).get(name, {})))
        if source.index is not None:
            _write_index(folder / source.index_name, source.index, outputs)
    return left


def _check_outputs(outputs: Sequence[Output]) -> None:
    seen: set[str] = set()
    for output in outputs:
        if output.name in seen:
            raise ConversionError(f"two tensors would be called {output.name!r}; nothing was written")
        seen.add(output.name)


def _check_place(source: Checkpoint, out: Path) -> None:
    here, there = source.folder.resolve(), out.resolve()
    if there == here or (source.path.exists() and there == source.path.resolve()):
        raise ConversionError(f"the output {out} is the source; give a new folder")
    if here in there.parents and source.path.is_dir():
        raise ConversionError(f"the output {out} lies inside the source {source.path}; give a folder outside of it")
    if os.path.lexists(out):
        raise ConversionError(f"the output {out} exists already; give a new folder, or remove it first")
    if not there.parent.is_dir():
        raise ConversionError(f"the output's parent folder {there.parent} does not exist; make it first")


def _other_files(source: Checkpoint) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Files beside the weights by their relative name, and what is left out. A link's target is what counts."""
    if not source.path.is_dir():
        return {}, ()
    found: dict[str, Path] = {}
    left: list[str] = []
    for root, folders, files in os.walk(source.path):
        for name in sorted(folders):
            path = Path(root, name)
            if name.startswith(".") or path.is_symlink():
                folders.remove(name)
                left.append(f"{path.relative_to(source.path)} was not copied: a hidden or linked folder")
        folders.sort()
        for name in sorted(files):
            path = Path(root, name)
            relative = str(path.relative_to(source.path))
            if relative in source.files or relative == source.index_name:
                continue
            if root == str(source.path) and (path.suffix in _WEIGHTS or name.endswith((".index.json", ".safetensors"))):
                left.append(f"{relative} was not copied: other weights, not converted")
            elif not path.is_file():
                left.append(f"{relative} was not copied: no regular file")
            else:
                found[relative] = path
    return found, tuple(left)


@contextlib.contextmanager
def _new_folder(out: Path, needed: int) -> Generator[Path]:
    """A hidden sibling to fill; renamed at the end, removed on any failure. Its lock says that it is in use."""
    import fcntl

    parent = out.resolve().parent
    prefix = f".{out.name}.normkit-partial-"
    temporary: Path | None = None
    lock = -1
    try:
        _remove_leftovers(parent, prefix)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise ConversionError(
                f"not enough room in {parent}: {_size(needed)} are needed, {_size(free)} are free; nothing was written"
            )
        lock = os.open(temporary, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
        _sync_folders(temporary)
        os.chmod(temporary, 0o777 & ~_umask())
        if os.path.lexists(out):
            raise ConversionError(f"the output {out} appeared while it was written; it was left as it is")
        os.rename(temporary, out)
        temporary = None
        _sync(parent)
    except OSError as error:
        raise ConversionError(_failure(error, out, needed)) from error
    finally:
        if lock >= 0:
            os.close(lock)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """What a killed run left behind; what a living one has locked stays."""
    import fcntl

    for path in parent.iterdir():
        if not path.name.startswith(prefix) or path.is_symlink() or not path.is_dir():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        except BlockingIOError:
            raise ConversionError(f"another run is writing this output ({path}); wait for it") from None
        finally:
            os.close(descriptor)


def _failure(error: OSError, out: Path, needed: int) -> str:
    if error.errno in _FULL:
        return (
            f"the disk is full: {out} needs {_size(needed)}; free some room or give another place. "
            "Nothing was left behind and the source is as it was"
        )
    return f"cannot write {out}: {error.strerror or error} ({error.filename or out}); give a folder that can be written"


def _write_file(path: Path, tensors: Sequence[Output], metadata: Mapping[str, str]) -> None:
    """One safetensors file: the header first, since all sizes are known, then the bytes in order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            before = file.tell()
            for piece in tensor.pieces():
                file.write(piece)
            written = file.tell() - before
            if written != tensor.nbytes:
                raise ConversionError(f"{tensor.name!r} gave {written} bytes instead of {tensor.nbytes}")
        file.flush()
        os.fsync(file.fileno())


def _write_index(path: Path, index: Mapping[str, Any], outputs: Sequence[Output]) -> None:
    total = {"total_size": sum(o.nbytes for o in outputs)}
    content = {
        **index,
        "metadata": {**(index.get("metadata") or {}), **total},
        "weight_map": {o.name: o.file for o in sorted(outputs, key=lambda o: o.name)},
    }
    _write_whole(path, json.dumps(content, indent=2).encode() + b"\n")


def _write_whole(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as read, open(target, "xb") as written:
        shutil.copyfileobj(read, written, CHUNK)
        written.flush()
        os.fsync(written.fileno())
    shutil.copymode(source, target)


def _sync_folders(folder: Path) -> None:
    for root, _, _ in os.walk(folder):
        _sync(Path(root))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
