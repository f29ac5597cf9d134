"""Norms under other names: between families, frameworks and normkit's own Transformer, with their conventions.

A map is made only where every norm has the same kind and the same place on both sides; no name is dropped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normkit.convert.gain_evidence import shift
from normkit.convert.name_tables import NAMINGS, ROLES, STYLES, TEXTBOOK, Naming, Style
from normkit.convert.receipt import ConversionError
from normkit.residual.transformer_weights import Source
from normkit.spec import NormSpec

Shape = tuple[int, ...]
_COUNTER = "num_batches_tracked"
_IN_HEAD = "transform_norm"  # a file of the bare model lacks it
_VOID = ("eps", "weight_offset", "gain_dtype", "rounding", "output_dtype", "has_bias")
"""Fields of a spec that no name map can break: they change values (said in a note) or are checked otherwise."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A source tensor, or one of its equal parts, turned over or not."""

    key: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Renamed:
    """One tensor of the target."""

    key: str
    pieces: tuple[Piece, ...]
    transposed: bool = False
    """The pieces, stacked by their outputs, are turned over in the end."""
    shift: float = 0.0
    """What is added to a gain, where the conventions differ."""

    @property
    def plain(self) -> bool:
        """One whole tensor under another name."""
        return len(self.pieces) == 1 and not self.transposed and self.pieces[0] == Piece(self.pieces[0].key)


@dataclass(frozen=True)
class NameMap:
    """Every tensor of the target, and what must be known besides."""

    tensors: tuple[Renamed, ...]
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """Tensors that hold no weights and have no place in the target."""

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The target's tensors."""
        made = {}
        for renamed in self.tensors:
            parts = [_cut(tensors[p.key], p) for p in renamed.pieces]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            whole = whole.T.contiguous() if renamed.transposed and whole.dim() == 2 else whole
            made[renamed.key] = shift(whole, renamed.shift) if renamed.shift else whole
        return made


def _cut(tensor: Tensor, piece: Piece) -> Tensor:
    tensor = tensor.T.contiguous() if piece.transposed and tensor.dim() == 2 else tensor
    return tensor.chunk(piece.part[1])[piece.part[0]] if piece.part[1] > 1 else tensor


def naming(text: str) -> Naming:
    """A naming by its name: one of `NAMINGS`, or ``NAME/STYLE`` with one of `STYLES`, such as ``gpt2/flax``.

    Raises:
        ConversionError: it is not known.
    """
    name, _, style = text.partition("/")
    if name not in NAMINGS or (style and style not in STYLES):
        raise ConversionError(
            f"no naming {text!r}; known are {', '.join(NAMINGS)}, each also as NAME/STYLE with {', '.join(STYLES)}"
        )
    found = NAMINGS[name]
    if not style:
        return found
    spec = TEXTBOOK if style == "textbook" else found.spec
    return replace(found, style=STYLES[style], spec=spec, others=None)


def map_names(
    shapes: Mapping[str, Shape],
    source: str,
    target: str,
    *,
    source_offset: float | None = None,
    target_offset: float | None = None,
    keep_others: bool = False,
) -> NameMap:
    """The names, and conventions, of one naming in another.

    Args:
        shapes: every tensor's name and shape.
        source, target: see `naming`; or both a style of `STYLES` alone, for any model's norms (``keras`` to
            ``torch``).
        source_offset, target_offset: 0 where gains are stored as such, 1 where less one (Megatron's
            ``layernorm_zero_centered_gamma``); needed where a naming leaves it open and the other side differs.
        keep_others: keep what is no norm, and whose names are not known, under its name, instead of refusing.

    Raises:
        ConversionError: a naming that is not known; norms of another kind or at another place; a tensor without a
            place; shapes that do not fit.
    """
    if source in STYLES and target in STYLES:
        return _restyled(shapes, STYLES[source], STYLES[target], source, target, keep_others)
    a, b = naming(source), naming(target)
    _check_kind(a, b, source, target)
    norms, rest = _parsed(shapes, a)
    if not norms:
        raise ConversionError(f"none of the {len(shapes)} tensors has the name of one of {source}'s norms")
    _check_whole(norms, a, source)
    _check_place(norms, a, b, source, target)
    _check_shapes({key: shapes[key] for key in norms.values()}, norms, a, b, source, target)
    by, notes = _gain_shift(a, b, source, target, source_offset, target_offset)
    made = [
        Renamed(_rendered(b, *where), (Piece(key),), shift=by if where[2] == "weight" else 0.0)
        for where, key in norms.items()
    ]
    others, kept = _others({key: shapes[key] for key in rest}, a, b, source, target)
    if kept and not keep_others:
        raise ConversionError(
            f"{kept[0]!r} is no norm of {source} and has no name in {target} ({len(kept)} such in all); "
            "keep them as they are, or give the norms alone"
        )
    made += [*others, *(Renamed(key, (Piece(key),)) for key in kept)]
    if kept:
        notes.append(f"{len(kept)} tensors that are no norms keep their names, such as {kept[0]}")
    if a.spec and b.spec and a.spec.rounding != b.spec.rounding:
        notes.append(
            f"half precision differs: {source} rounds {a.spec.rounding.replace('_', ' ')}, "
            f"{target} {b.spec.rounding.replace('_', ' ')}"
        )
    _check_unique(made)
    return NameMap(tuple(made), tuple(notes))


Where = tuple[str, int | None, str]
"""Slot, layer, role."""


def _template(naming: Naming, slot: str) -> str:
    text = naming.slots[slot]
    return text if "{leaf}" in text else text + ".{leaf}"


def _rendered(naming: Naming, slot: str, layer: int | None, role: str) -> str:
    leaf = getattr(naming.style, role)
    text = _template(naming, slot).replace("{i}", str(layer)).replace("{leaf}", leaf)
    return text.replace(".", naming.style.separator)


def _parsed(keys: Iterable[str], naming: Naming) -> tuple[dict[Where, str], list[str]]:
    """Where each norm's tensor belongs, and the names that belong to none."""
    leaves = naming.style.leaves()
    patterns = []
    for slot in naming.slots:
        text = re.escape(_template(naming, slot)).replace(r"\{i\}", r"(?P<i>\d+)")
        patterns.append((slot, re.compile(text.replace(r"\{leaf\}", f"(?P<leaf>{'|'.join(map(re.escape, leaves))})"))))
    found: dict[Where, str] = {}
    rest = []
    for key in keys:
        text = key.replace(naming.style.separator, ".")
        where = next((w for t in (text, naming.prefix + text) if (w := _where(t, patterns, leaves))), None)
        if where is None:
            rest.append(key)
        elif where in found:
            raise ConversionError(f"{found[where]!r} and {key!r} are names of one and the same tensor")
        else:
            found[where] = key
    return found, rest


def _where(text: str, patterns: Sequence[tuple[str, re.Pattern[str]]], leaves: Mapping[str, str]) -> Where | None:
    for slot, pattern in patterns:
        match = pattern.fullmatch(text)
        if match:
            layer = match.groupdict().get("i")
            return slot, None if layer is None else int(layer), leaves[match["leaf"]]
    return None


def _check_kind(a: Naming, b: Naming, source: str, target: str) -> None:
    if a.spec is None or b.spec is None:
        return
    if a.spec.kind != b.spec.kind:
        raise ConversionError(f"{source} has norms of kind {a.spec.kind}, {target} of kind {b.spec.kind}: no name map")
    one, other = a.spec.to_dict(), b.spec.to_dict()
    differ = [name for name in one if name not in _VOID and one[name] != other[name]]
    if differ:
        how = ", ".join(f"{name} {one[name]!r} against {other[name]!r}" for name in differ)
        raise ConversionError(f"{source}'s norms compute something else than {target}'s ({how}): no name map")


def _check_whole(norms: Mapping[Where, str], a: Naming, source: str) -> None:
    """Layers without a gap, and of a family every norm in every layer."""
    layers: defaultdict[str, set[int]] = defaultdict(set)
    for slot, layer, _ in norms:
        if layer is not None:
            layers[slot.split("{i}")[0]].add(layer)
    present = {(slot, layer) for slot, layer, _ in norms}
    for slot in a.slots if a.required else ():
        if "{i}" not in slot and slot != _IN_HEAD and (slot, None) not in present:
            raise ConversionError(f"{_rendered(a, slot, None, 'weight')!r} is missing, which {source} has")
    for side, numbers in layers.items():
        gaps = sorted(set(range(max(numbers) + 1)) - numbers)
        if gaps:
            raise ConversionError(f"layer {gaps[0]} of {max(numbers) + 1} has no norm of {source}: is a shard missing?")
        slots = [s for s in a.slots if s.startswith(side)] if a.required else {s for s, n in present if n == 0}
        for slot in slots:
            for layer in sorted(numbers):
                if slot.startswith(side) and "{i}" in slot and (slot, layer) not in present:
                    name = _rendered(a, slot, layer, "weight")
                    raise ConversionError(f"{name!r} is missing, which {source} has in every layer")


def _check_place(norms: Mapping[Where, str], a: Naming, b: Naming, source: str, target: str) -> None:
    have = {slot for slot, _, _ in norms}
    extra = sorted((s for s in a.slots if s in have and s not in b.slots), key=lambda s: "{i}" not in s)  # layers first
    if extra:
        key = next(key for where, key in norms.items() if where[0] == extra[0])
        raise ConversionError(f"{target} has no norm where {source} has {key!r} ({_words(extra[0])}): no name map")
    lacking = [slot for slot in b.slots if b.required and slot not in have and slot != _IN_HEAD]
    if lacking:
        name = _rendered(b, lacking[0], 0, "weight")
        raise ConversionError(f"{target} also has {name!r} ({_words(lacking[0])}), which the source lacks: no name map")


def _words(slot: str) -> str:
    """The place of a slot in words."""
    part = slot.rpartition(".")[2]
    branch = "attention" if ".attention." in slot else "cross-attention" if ".cross." in slot else "feed-forward layer"
    return {
        "input_norm": f"pre-norm of the {branch}",
        "output_norm": f"on the output of the {branch}",
        "stream_norm": f"post-norm after the {branch}",
        "query_norm": "on the queries",
        "key_norm": "on the keys",
        "final_norm": "after the last layer",
        "embedding_norm": "on the embeddings",
        "transform_norm": "in the head",
    }[part]


def _check_shapes(
    shapes: Mapping[str, Shape], norms: Mapping[Where, str], a: Naming, b: Naming, source: str, target: str
) -> None:
    width: tuple[int, str] | None = None
    heads: dict[str, tuple[int, str]] = {}
    for (slot, layer, role), key in norms.items():
        shape = shapes[key]
        if len(shape) != 1:
            raise ConversionError(f"{key!r} has shape {shape}; a norm's {role} is a vector")
        partner = norms.get((slot, layer, "weight"))
        if role != "weight" and (partner is None or shapes[partner] != shape):
            raise ConversionError(f"{key!r} has shape {shape}, its gain {partner and shapes[partner]}")
        for owner, side in ((a, source), (b, target)):
            if role == "bias" and owner.spec is not None and not owner.spec.has_bias:
                raise ConversionError(f"{key!r} is a bias, and {side}'s norms have none: no name map")
            if owner.spec is not None and owner.spec.has_bias and (slot, layer, "bias") not in norms:
                raise ConversionError(f"{key!r} has no bias beside it, and {side}'s norms have one: no name map")
        if slot.endswith((".query_norm", ".key_norm")):
            first = heads.setdefault(slot, (shape[0], key))
        else:
            first = width = width or (shape[0], key)
        if first[0] != shape[0]:
            raise ConversionError(f"{key!r} has {shape[0]} features, {first[1]!r} has {first[0]}: they should agree")
    if width is None or not heads:
        return
    sizes = {slot.rpartition(".")[2]: size for slot, (size, _) in heads.items()}
    for owner, side in ((a, source), (b, target)):
        if owner.qk == "head" and len(set(sizes.values())) > 1:
            raise ConversionError(f"query and key norms of {sizes} features: {side} normalizes each head, all alike")
        if owner.qk == "full" and sizes.get("query_norm", width[0]) != width[0]:
            raise ConversionError(
                f"the query norm has {sizes['query_norm']} features of {width[0]}: {side} normalizes all heads together"
            )


def _gain_shift(
    a: Naming, b: Naming, source: str, target: str, mine: float | None, theirs: float | None
) -> tuple[float, list[str]]:
    """What is added to stored gains, and what was taken for granted."""
    for side, owner, given in ((source, a, mine), (target, b, theirs)):
        if given is not None and given not in (0.0, 1.0):
            raise ConversionError(f"the offset of {side}'s gains must be 0 or 1; got {given}")
        if given is not None and owner.weight_offset is not None and given != owner.weight_offset:
            raise ConversionError(f"{side} stores gains with offset {owner.weight_offset:g}, not {given:g}")
    one = a.weight_offset if mine is None else mine
    other = b.weight_offset if theirs is None else theirs
    if one is None or other is None:
        if one is None and other is None:
            return 0.0, ["neither side says whether gains are stored as w or 1+w: they are kept as they are"]
        if target == "normkit" and mine is None:  # its specs hold either
            return 0.0, [f"gains stay with offset {one:g}: build the Transformer's norm with weight_offset={one:g}"]
        if source == "normkit" and theirs is None:
            return 0.0, [f"gains are taken to be stored with offset {other:g}, as from_transformers builds {target}"]
        open_side, known = (source, target) if one is None else (target, source)
        raise ConversionError(
            f"{open_side} may store gains as w or 1+w (layernorm_zero_centered_gamma), and {known} fixes it: say which"
        )
    notes = [f"gains: offset {one:g} to {other:g}"] if one != other else []
    return one - other, notes


def _others(
    shapes: Mapping[str, Shape], a: Naming, b: Naming, source: str, target: str
) -> tuple[list[Renamed], list[str]]:
    """What is no norm: renamed where both sides' names are known, and the names without a place."""
    known_a, known_b = a.others, b.others
    if source == "normkit" and known_b is not None:
        known_a = {mine: Source(mine) for mine in known_b}
    if target == "normkit" and known_a is not None:
        known_b = {mine: Source(mine) for mine in known_a}
    if known_a is None or known_b is None:
        return [], list(shapes)
    ours: dict[tuple[str, int | None], list[Piece]] = {}
    used: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for mine, s in known_a.items():
        pattern = re.compile(re.escape(s.name).replace(r"\{i\}", r"(?P<i>\d+)"))
        for key in shapes:
            match = pattern.fullmatch(key) or pattern.fullmatch(a.prefix + key)
            if match and mine in known_b:
                layer = match.groupdict().get("i")
                piece = Piece(key, s.transposed and len(shapes[key]) == 2, s.part or (0, 1))
                ours.setdefault((mine, None if layer is None else int(layer)), []).append(piece)
                used[key].add(piece.part)
    made: dict[str, dict[int, Piece]] = {}
    shape_of: dict[str, tuple[bool, int]] = {}
    for (mine, layer), pieces in ours.items():
        wanted = known_b[mine]
        key = wanted.name.replace("{i}", str(layer))
        number, count = wanted.part or (0, 1)
        made.setdefault(key, {})[number] = pieces[0]
        shape_of[key] = (wanted.transposed and len(shapes[pieces[0].key]) == 2, count)
    renamed = []
    for key, parts in made.items():
        turned, count = shape_of[key]
        if len(parts) != count:
            raise ConversionError(
                f"{target} stores {key!r} of {count} tensors, and the source has {len(parts)} of them"
            )
        renamed.append(Renamed(key, tuple(parts[n] for n in range(count)), turned))
    for key, pieces in used.items():
        if len(pieces) != next(iter(pieces))[1]:
            raise ConversionError(f"only {len(pieces)} parts of {key!r} have a name in {target}")
        along = (
            -1 if len(shapes[key]) == 2 and any(p.transposed for q in ours.values() for p in q if p.key == key) else 0
        )
        if shapes[key] and shapes[key][along] % next(iter(pieces))[1]:
            raise ConversionError(f"{key!r} of shape {shapes[key]} cannot be cut into {next(iter(pieces))[1]} parts")
    return renamed, [key for key in shapes if key not in used]


def _restyled(shapes: Mapping[str, Shape], a: Style, b: Style, source: str, target: str, keep_others: bool) -> NameMap:
    """Any model's norms: what has a vector of gains, or running statistics."""
    if (source == "textbook") != (target == "textbook"):
        raise ConversionError(
            "a_2 and b_2 belong to a norm that divides by the unbiased deviation plus eps, no other framework's: only "
            "normkit builds it (ANNOTATED_LAYER, map to normkit or between names of one family)"
        )
    leaves = a.leaves()
    modules: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for key in shapes:
        text = key
        for collection in a.collections:
            text = text.removeprefix(collection)
        path, _, leaf = text.rpartition(a.separator)
        modules[path].setdefault(leaf, key)
    made: list[Renamed] = []
    left: list[str] = []
    kept: list[str] = []
    for path, tensors in modules.items():
        gain = tensors.get(a.weight)
        is_norm = a.running_mean in tensors or (gain is not None and len(shapes[gain]) == 1)
        for leaf, key in tensors.items():
            if is_norm and leaf in leaves:
                role = leaves[leaf]
                collection = b.collections[role.startswith("running")]
                parts = [p for p in (path.replace(a.separator, b.separator), getattr(b, role)) if p]
                made.append(Renamed(collection + b.separator.join(parts), (Piece(key),)))
            elif is_norm and leaf == _COUNTER:
                left.append(key)
            else:
                kept.append(key)
    if not made:
        raise ConversionError(f"none of the {len(shapes)} tensors is a norm's under {source}'s names")
    if kept and not keep_others:
        raise ConversionError(f"{kept[0]!r} is no norm's tensor ({len(kept)} such in all); keep them as they are")
    notes = ["momentum: torch's is 1 - the other's, see from_keras"] if any("running" in r.key for r in made) else []
    made += [Renamed(key, (Piece(key),)) for key in kept]
    _check_unique(made)
    notes += [f"{key} is left out: {target} counts no batches" for key in left]
    return NameMap(tuple(made), tuple(notes), tuple(left))


def _check_unique(made: Sequence[Renamed]) -> None:
    seen: set[str] = set()
    for renamed in made:
        if renamed.key in seen:
            raise ConversionError(f"two tensors would be called {renamed.key!r}: no name map")
        seen.add(renamed.key)


def running_momentum(decay: float) -> float:
    """torch's momentum for the decay that Keras and Flax call momentum: ``new = (1 - m) * old + m * batch``.

    Raises:
        ConversionError: not in [0, 1].
    """
    if not 0 <= decay <= 1:
        raise ConversionError(f"momentum must be in [0, 1]; got {decay!r}")
    return 1 - decay


def from_keras(kind: str, config: Mapping[str, Any]) -> NormSpec:
    """What a Keras layer computes: its momentum is 1 - torch's, its eps is 1e-3 by default, its channels are last.

    Args:
        kind: ``BatchNormalization``, ``LayerNormalization`` or ``GroupNormalization``.
        config: ``layer.get_config()``.

    Raises:
        ConversionError: another layer, or an axis or option that has no NormSpec.
    """
    axis = config.get("axis", -1)
    axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
    if config.get("rms_scaling"):
        raise ConversionError("rms_scaling=True divides by the deviation of centred values times the gain: no NormSpec")
    if axis not in (-1, 1) or (kind == "LayerNormalization" and axis != -1):
        raise ConversionError(f"axis={axis!r} of {kind} is not supported; -1 is (and 1 for batch and group)")
    shared: dict[str, Any] = {
        "eps": config.get("epsilon", 1e-3),
        "has_weight": config.get("scale", True),
        "has_bias": config.get("center", True),
        "channel_dim": axis,
    }
    if kind == "LayerNormalization":
        return NormSpec(**shared)
    if kind == "BatchNormalization":
        return NormSpec(axes="batch", running=running_momentum(config.get("momentum", 0.99)), **shared)
    if kind == "GroupNormalization":
        groups = config.get("groups", 32)
        return NormSpec(axes="instance" if groups == -1 else "group", groups=1 if groups == -1 else groups, **shared)
    raise ConversionError(f"no NormSpec for Keras's {kind}")


__all__ = ["ROLES", "NameMap", "Piece", "Renamed", "from_keras", "map_names", "naming", "running_momentum"]
