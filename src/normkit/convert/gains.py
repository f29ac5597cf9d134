"""Gain conventions of a checkpoint: does each norm store its gain (w) or its gain less one (1 + w)? Tell and convert.

Four witnesses, per norm: a tag that an earlier conversion left, the stored values (`gain_evidence`), the values of
norms that the model computes alike, and what the config's model does with the stored values (found by behaviour).
Where they do not suffice, or contradict one another, the answer is that it cannot be told.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from normkit.audit.core import AuditError, audit
from normkit.audit.load import ModelError, load
from normkit.convert.checkpoint import DTYPES, Checkpoint, open_checkpoint
from normkit.convert.gain_evidence import OFFSETS, Convention, score, shift
from normkit.convert.gain_proof import loaded_names, measured
from normkit.convert.receipt import Change, ConversionError, Receipt, Refusal, deviation
from normkit.convert.stream import Output, copied, write_checkpoint

TAG = "normkit.gains"
"""Metadata key: a JSON object of tensor names to conventions."""

CORROBORATED, DECIDES, OVERRULES = 2.3, 6.0, 9.2
"""Nats (odds of 10, 400 and 10 000) that the values need: with the config for them, without one, and against it."""
_POOLED = 4
_OPPOSED = 2.3
_LINKED = 0.5
_CENTRED_FLAGS = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
_GAIN_LEAVES = ("weight", "scale", "gamma", "g", "a_2", "layer_norm_weight")


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One norm's stored gain and what is known about it."""

    name: str
    """Of the tensor."""
    score: float
    """What its values say: positive for w, negative for 1+w, in nats."""
    median: float
    reads: Convention | None = None
    """What the config's model takes the stored values for."""
    tag: Convention | None = None
    group: str = ""
    """Norms of one group are computed alike: they share a convention unless their values say otherwise."""
    stored: Convention | None = None
    """The verdict; None where it cannot be told."""
    reason: str = ""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "name": self.name,
            "stored": self.stored,
            "model_reads": self.reads,
            "tag": self.tag,
            "score": round(self.score, 2),
            "median": round(self.median, 4),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Reads:
    """What a config says about norms: stored name to (convention, group); and notes."""

    norms: Mapping[str, tuple[Convention, str]]
    everywhere: Convention | None = None
    notes: tuple[str, ...] = ()


def detect_gains(
    source: Checkpoint | str | Path, *, progress: Callable[[str], None] = lambda _: None
) -> tuple[tuple[Gain, ...], tuple[str, ...]]:
    """The convention of every norm's stored gain, per norm.

    Args:
        source: a safetensors file or a folder; its ``config.json``, if it has one, says what the model reads.
        progress: called with a word on what is being done.

    Returns:
        One `Gain` a norm, in the file's order, and notes on what could not be used.

    Raises:
        ConversionError: as `open_checkpoint`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    progress("building the config's model")
    said = what_the_config_reads(checkpoint)
    tags = gain_tags(checkpoint)
    found = []
    for name in said.norms or _candidates(checkpoint):
        stored = checkpoint.tensors[name]
        if stored.dtype not in DTYPES:
            continue
        values = stored.tensor()
        reads, group = said.norms.get(name, (said.everywhere, re.sub(r"\d+", "*", name)))
        found.append(
            Gain(
                name=name,
                score=score(values),
                median=float(values.double().flatten().median()) if values.numel() else 0.0,
                reads=reads,
                tag=tags.get(name),
                group=group,
            )
        )
    order = {name: n for n, name in enumerate(checkpoint.tensors)}
    return tuple(sorted(decide(found), key=lambda g: order[g.name])), said.notes


def decide(gains: Sequence[Gain]) -> list[Gain]:
    """Fill in every verdict and its reason."""
    groups: defaultdict[str, list[Gain]] = defaultdict(list)
    for gain in gains:
        groups[gain.group].append(gain)
    found: list[Gain] = []
    for group in groups.values():
        strong = [g for g in group if abs(g.score) >= DECIDES]
        members = strong or group
        mean = sum(g.score for g in members) / len(members)
        kin = _Kin(len(group), members, mean, len({_side(g.score) for g in strong}) > 1)
        found += [_judged(gain, kin) for gain in group]
    return found


@dataclass(frozen=True)
class _Kin:
    """Norms that are computed alike, and what the values of those with strong evidence (else of all) say together."""

    count: int
    members: Sequence[Gain]
    mean: float
    split: bool
    """Not all are stored alike: each stands for itself."""


def _judged(gain: Gain, kin: _Kin) -> Gain:
    values = _side(gain.score)
    if gain.tag is not None:
        if values != gain.tag and abs(gain.score) >= OVERRULES:
            return replace(gain, reason=f"tagged {gain.tag}, but its values are those of {values}")
        return replace(gain, stored=gain.tag, reason="tagged by an earlier conversion")
    if kin.split:
        evidence, whose = gain.score, "its own values (norms computed alike are stored differently)"
        needed = DECIDES if values == gain.reads else OVERRULES
    else:
        evidence = kin.mean * min(len(kin.members), _POOLED)
        whose = "its values" if kin.count == 1 else f"the values of {kin.count} norms computed alike"
        needed = {None: DECIDES, _side(evidence): CORROBORATED}.get(gain.reads, OVERRULES)
        if values != _side(evidence) and abs(gain.score) >= _OPPOSED and not _linked(gain, kin.members):
            return replace(gain, reason=f"cannot tell: its values look like {values}, those of its kin do not")
    side = _side(evidence)
    config = "no config says" if gain.reads is None else f"the config's model reads {gain.reads}"
    if abs(evidence) >= needed:
        return replace(gain, stored=side, reason=f"{whose} say {side}; {config}")
    lean = "fit both" if abs(evidence) < CORROBORATED else f"lean to {side}"
    return replace(gain, reason=f"cannot tell: {whose} {lean}; {config}")


def _side(value: float) -> Convention:
    return "w" if value >= 0 else "1+w"


def _linked(gain: Gain, members: Sequence[Gain]) -> bool:
    """Whether its middle is one of its kin's: an outlier of another kind lies apart."""
    return any(abs(gain.median - g.median) <= _LINKED for g in members if g is not gain)


def _candidates(checkpoint: Checkpoint) -> list[str]:
    """Without a model: vectors that are called a gain by anyone."""
    return [
        name
        for name, t in checkpoint.tensors.items()
        if len(t.shape) == 1 and t.dtype in DTYPES and name.replace("/", ".").rpartition(".")[2] in _GAIN_LEAVES
    ]


def gain_tags(checkpoint: Checkpoint) -> dict[str, Convention]:
    """The conventions that earlier conversions wrote into the metadata."""
    found: dict[str, Convention] = {}
    for file, metadata in checkpoint.metadata.items():
        try:
            tags = json.loads(metadata.get(TAG, "{}"))
        except json.JSONDecodeError:
            tags = None
        if not isinstance(tags, dict) or not set(map(str, tags.values())) <= set(OFFSETS):
            raise ConversionError(f"{file} has metadata {TAG} that maps no names to 'w' or '1+w'; remove it")
        found |= tags
    return found


def what_the_config_reads(checkpoint: Checkpoint) -> Reads:
    """What the config's model takes each stored gain for, by building it without weights and probing its norms."""
    path = checkpoint.folder / "config.json"
    if not path.is_file():
        return Reads({}, notes=("no config.json: the values alone must tell",))
    everywhere = _flagged(path)
    if everywhere is not None:
        return Reads({}, everywhere, (f"config.json says zero-centred gains: {everywhere} everywhere",))
    try:
        loaded = load(str(checkpoint.folder), device="meta")
        audited = audit(loaded.model, *loaded.args, **loaded.kwargs)
    except (ModelError, AuditError) as error:
        return Reads({}, notes=(f"no model from config.json, so the values alone must tell: {error}",))
    files = loaded_names(loaded.model, checkpoint.tensors)
    found: dict[str, tuple[Convention, str]] = {}
    missing = 0
    for norm in audited.norms:
        spec, weight = norm.spec, norm.parameters.get("weight")
        if spec is None or weight is None or spec.weight_offset not in OFFSETS.values():
            continue
        name = f"{norm.name}.{weight}" if norm.name else weight
        key = files.get(name)
        if key is None:
            missing += 1
            continue
        convention: Convention = "1+w" if spec.weight_offset else "w"
        found[key] = (convention, repr(spec.replace(eps=1.0).canonical()))
    notes = [f"{missing} norms of the config's model are not in the files"] if missing and found else []
    if not found:
        notes = ["the files hold no norm of the config's model under its name, so the values alone must tell"]
    return Reads(found, notes=tuple(notes))


def _flagged(config: Path) -> Convention | None:
    """Megatron's and NeMo's own flags, which hold for every norm of a model."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for part in (content, content.get("model") if isinstance(content, dict) else None):
        if isinstance(part, dict):
            if any(part.get(flag) is True for flag in _CENTRED_FLAGS) or part.get("normalization") == "layernorm1p":
                return "1+w"
            if part.get(_CENTRED_FLAGS[0]) is False:
                return "w"
    return None


def convert_gains(
    source: str | Path,
    out: str | Path | None,
    *,
    to: Literal["w", "1+w", "model"] = "model",
    stored: Mapping[str, str] | None = None,
    leave_unknown: bool = False,
    probe: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Receipt:
    """Store every norm's gain in one convention, or in the one that the config's model reads, in a new folder.

    A gain that is stored so already stays bit for bit, and each is tagged in the metadata: a second run changes
    nothing. The others are moved by one in float32 and rounded once to their dtype.

    Args:
        source: a safetensors file or a folder.
        out: the new folder; None to say only what would be done.
        to: ``"w"``, ``"1+w"`` or ``"model"``.
        stored: for norms that cannot be told: a pattern of tensor names (``*`` matches anything) to ``"w"``,
            ``"1+w"`` or ``"config"``; the first that matches holds.
        leave_unknown: convert the others where some cannot be told, instead of nothing.
        probe: build the config's model, where it is small, and measure its outputs before and after.
        progress: called with a word on what is being done.

    Raises:
        ConversionError: as `open_checkpoint` and `write_checkpoint`; norms that cannot be told.
    """
    checkpoint = open_checkpoint(source)
    found, notes = detect_gains(checkpoint, progress=progress)
    if not found:
        raise ConversionError(f"{source} holds no norm's gain: " + "; ".join(notes))
    found = tuple(_stated(g, stored or {}) for g in found)
    targets = {g.name: g.reads if to == "model" else to for g in found}
    refused = [Refusal(g.name, g.reason) for g in found if g.stored is None]
    refused += [Refusal(g.name, "no config says what a model reads") for g in found if g.stored and not targets[g.name]]
    moves = {g.name: (g.stored, t) for g in found if g.stored and (t := targets[g.name])}
    changed = tuple(_change(checkpoint, name, *move) for name, move in moves.items() if move[0] != move[1])
    receipt = Receipt(
        conversion="gains",
        model=str(source),
        changed=changed,
        refused=tuple(refused),
        notes=(*notes, *_summary(found, targets, to)),
    )
    if refused and not leave_unknown:
        receipt.notes += ("nothing was written: say how the norms left are stored, or leave them as they are",)
        return receipt
    shifts = {name: OFFSETS[a] - OFFSETS[b] for name, (a, b) in moves.items() if a != b}
    if probe and changed:
        progress("measuring outputs")
        conventions = {g.name: (g.stored, g.reads) for g in found}
        receipt.errors, said = measured(checkpoint, conventions, shifts)
        receipt.notes += said
    if out is not None:
        tags: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name, convention in {**gain_tags(checkpoint), **{name: move[1] for name, move in moves.items()}}.items():
            if name in checkpoint.tensors:
                tags[checkpoint.file_of(name)][name] = convention
        outputs = [_output(checkpoint, name, shifts.get(name, 0.0)) for name in checkpoint.tensors]
        metadata = {file: {TAG: json.dumps(t, sort_keys=True)} for file, t in tags.items()}
        receipt.notes += write_checkpoint(checkpoint, out, outputs, metadata=metadata, progress=progress)
        receipt.notes += (f"written to {out}",)
    return receipt


def _stated(gain: Gain, stored: Mapping[str, str]) -> Gain:
    """What the user says about a norm that cannot be told."""
    if gain.stored is not None:
        return gain
    for pattern, convention in stored.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), gain.name, re.DOTALL):
            said = gain.reads if convention == "config" else _convention(convention)
            if said is None:
                raise ConversionError(f"stored must say 'w', '1+w' or 'config' (with one); got {convention!r}")
            return replace(gain, stored=said, reason=f"stated: {convention} ({gain.reason})")
    return gain


def _convention(text: str) -> Convention | None:
    return "w" if text == "w" else "1+w" if text == "1+w" else None


def _change(checkpoint: Checkpoint, name: str, stored: Convention, to: Convention) -> Change:
    """With the largest relative error that the dtype's rounding makes of a gain."""
    values = checkpoint.tensors[name].tensor()
    after = shift(values, OFFSETS[stored] - OFFSETS[to]).double() + OFFSETS[to]
    gains = values.double() + OFFSETS[stored]
    off = deviation(after, gains)
    return Change(name=name, what=f"{stored} to {to}" + (f", gains off by {off:.0e}" if off else ""))


def _summary(found: Sequence[Gain], targets: Mapping[str, str | None], to: str) -> tuple[str, ...]:
    notes = []
    same = sum(g.stored is not None and g.stored == targets[g.name] for g in found)
    if same:
        notes.append(f"{same} norms are stored so already and stay bit for bit")
    baked = [g for g in found if g.stored and g.reads and g.stored != g.reads]
    if baked:
        first = baked[0]
        notes.append(
            f"{len(baked)} norms are stored as {first.stored} where the config's model reads {first.reads}, "
            f"such as {first.name}: loaded as it is, the model is wrong"
        )
    misread = [g for g in found if g.reads and to != "model" and g.reads != to]
    if misread:
        notes.append(
            f"the config's model reads {misread[0].reads} for {len(misread)} norms: it is no reader of the new file"
        )
    return tuple(notes)


def _output(checkpoint: Checkpoint, name: str, by: float) -> Output:
    stored = checkpoint.tensors[name]
    same = copied(stored)
    return same if not by else replace(same, pieces=lambda: stored.mapped(lambda values: shift(values, by)))
