"""Rename a checkpoint's tensors, streamed to a new folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from normkit.convert.checkpoint import CONFIG, DTYPES, OLD_CONFIG, Checkpoint, open_checkpoint
from normkit.convert.gain_evidence import OFFSETS, Convention, shift
from normkit.convert.gains import TAG, gain_tags
from normkit.convert.name_proof import measured
from normkit.convert.name_tables import NAMINGS, STYLES
from normkit.convert.names import NameMap, Renamed, map_names, naming
from normkit.convert.receipt import Change, ConversionError, Receipt
from normkit.convert.stream import Output, Part, assembled, copied, write_checkpoint


def convert_names(
    source: str | Path,
    out: str | Path | None,
    *,
    names: str,
    to: str,
    gains: Convention | None = None,
    to_gains: Convention | None = None,
    keep_others: bool = False,
    probe: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Receipt:
    """Write a checkpoint under another naming, with its gain convention, to a new folder.

    Args:
        source: a safetensors file or a folder.
        out: the new folder; None to say only what would be done.
        names, to: namings as in `map_names`.
        gains, to_gains: how gains are stored, where the naming leaves it open.
        keep_others: as in `map_names`.
        probe: build the models of both ends, where configs can and the files are small, and measure how far apart they
            are.
        progress: called with a word on what is being done.

    The old ``config.json`` describes the old names, so it becomes ``config.source.json``.

    Raises:
        ConversionError: as `map_names`, `open_checkpoint` and `write_checkpoint`; tags that say another convention.
    """
    checkpoint = open_checkpoint(source)
    made = map_names(
        {name: t.shape for name, t in checkpoint.tensors.items()},
        names,
        to,
        source_offset=None if gains is None else OFFSETS[gains],
        target_offset=None if to_gains is None else OFFSETS[to_gains],
        keep_others=keep_others,
    )
    tags = _renamed_tags(checkpoint, made, names, to, gains, to_gains)
    outputs = [_output(checkpoint, renamed) for renamed in made.tensors]
    changed = tuple(_change(r) for r in made.tensors if not (r.plain and r.key == r.pieces[0].key and not r.shift))
    kept = len(made.tensors) - len(changed)
    notes = [*made.notes, *([f"{kept} tensors keep their names"] if kept else [])]
    errors = None
    if probe:
        progress("measuring outputs")
        errors, said = measured(checkpoint, made, to)
        notes += said
    others = {CONFIG: OLD_CONFIG} if (checkpoint.folder / CONFIG).is_file() and checkpoint.path.is_dir() else {}
    if others:
        notes.append(f"{CONFIG} describes the old names: it becomes {OLD_CONFIG}")
    if out is not None:
        notes += write_checkpoint(checkpoint, out, outputs, metadata=tags, renamed=others, progress=progress)
        notes.append(f"written to {out}")
    return Receipt(
        conversion="names", model=f"{source}, {names} to {to}", changed=changed, errors=errors, notes=tuple(notes)
    )


def _change(renamed: Renamed) -> Change:
    what = f"to {renamed.key}"
    if not renamed.plain:
        cut = [f"part {p.part[0] + 1} of {p.part[1]}" for p in renamed.pieces if p.part[1] > 1]
        joined = [f"{len(renamed.pieces)} joined"] if len(renamed.pieces) > 1 else []
        turned = ["turned over"] if renamed.transposed or any(p.transposed for p in renamed.pieces) else []
        what += f" ({', '.join([*cut, *joined, *turned])})"
    if renamed.shift:
        what += f", gains {renamed.shift:+g}"
    return Change(name=" + ".join(p.key for p in renamed.pieces), what=what)


def _output(checkpoint: Checkpoint, renamed: Renamed) -> Output:
    sources = [checkpoint.tensors[p.key] for p in renamed.pieces]
    first = sources[0]
    if renamed.plain:
        same = copied(first, renamed.key)
        if not renamed.shift:
            return same
        if first.dtype not in DTYPES:
            raise ConversionError(f"{first.name!r} is stored as {first.dtype}: its gains cannot be converted")
        return replace(same, pieces=lambda: first.mapped(lambda values: shift(values, renamed.shift)))
    for stored in sources:
        if stored.dtype not in DTYPES or stored.dtype != first.dtype:
            raise ConversionError(
                f"{stored.name!r} is stored as {stored.dtype}: it cannot be cut, joined or turned over"
            )
    parts = [Part(s, p.transposed, p.part) for s, p in zip(sources, renamed.pieces, strict=True)]
    return assembled(renamed.key, first.file.name, parts, transposed=renamed.transposed)


def _renamed_tags(
    checkpoint: Checkpoint, made: NameMap, names: str, to: str, gains: Convention | None, to_gains: Convention | None
) -> dict[str, dict[str, str]]:
    """Tags under the new names; a tag against what the naming stores is refused."""
    old = gain_tags(checkpoint)
    stated = gains or _own(names)
    other = to_gains or _own(to)
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for renamed in made.tensors:
        key = renamed.pieces[0].key
        if key not in old:
            continue
        if stated is not None and old[key] != stated:
            raise ConversionError(
                f"{key!r} is tagged {old[key]}, and {names} stores {stated}: convert its gains to {stated} first"
            )
        convention: str = other or old[key]
        found[checkpoint.file_of(key)][renamed.key] = convention
    return {file: {TAG: json.dumps(found[file], sort_keys=True)} for file, m in checkpoint.metadata.items() if TAG in m}


def _own(text: str) -> Convention | None:
    if text in STYLES and text not in NAMINGS:
        return None
    offset = naming(text).weight_offset
    return None if offset is None else "1+w" if offset else "w"
