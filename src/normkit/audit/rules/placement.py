"""Placement: what the residual streams lack, have twice, or are named against."""

from __future__ import annotations

import re
from collections.abc import Iterator

from normkit.audit.result import BranchRecord, Finding, NormRecord
from normkit.audit.rules.registry import Evidence, MakeFinding, rule
from normkit.audit.rules.schedules import warms_up
from normkit.placement import PLACEMENTS


@rule("missing-final-norm", "warning", "a pre-norm stream ends without a norm")
def missing_final_norm(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """The stream grows with depth; without a last norm the head sees its scale."""
    for stream, branches in _streams(evidence).items():
        wanting = [b for b in branches if b.placement in PLACEMENTS and PLACEMENTS[b.placement].final_norm]
        if len(branches) < 2 or branches[-1] not in wanting or stream in evidence.continued:
            continue
        places = [place for b in branches for place in _places(evidence, b)]
        if 2 * places.count("conv") > len(places):
            continue  # convolutional networks end in pooling or in a head's convolutions, and need none
        if not _finals(evidence, stream) and not branches[-1].slots.get("stream"):
            yield finding(
                (branches[-1].name,),
                f"is the last of {len(branches)} residual branches ({branches[-1].placement}), and no norm follows it: "
                "the head reads an unnormalized stream, whose scale grows with depth",
                "add a final norm after the last block (in torch.nn.TransformerEncoder: the norm= argument)",
            )


@rule("double-final-norm", "warning", "a post-norm stream is normalized twice at its end")
def double_final_norm(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """The last block's own norm already ends the stream; the second one mostly undoes its gain."""
    for stream, branches in _streams(evidence).items():
        last = branches[-1]
        finals = _finals(evidence, stream)
        ends = last.slots.get("stream", ())
        if any(evidence.reruns.reads(n.name, end) for n in finals for end in ends):
            yield finding(
                (*last.slots["stream"], *(n.name for n in finals)),
                "normalizes the end of the stream twice: the last block is post-norm, and a final norm follows it",
                "leave out the final norm (in torch.nn.Transformer it is built in; publish it if weights depend on it)",
            )


_SAYS: tuple[tuple[str, frozenset[str], str], ...] = (
    (r"(^|_)(post|after)(_|$)", frozenset({"post", "output", "final", "head"}), "after a sublayer"),
    (r"(^|_)(pre|before|input)(_|$)", frozenset({"pre", "embedding", "conv", "inner"}), "before a sublayer"),
    (r"(^|_)final(_|$)", frozenset({"final", "head"}), "at the end of the model"),
    (r"(^|_)(q|k|query|key)(_|$)", frozenset({"qk", "inner"}), "on queries and keys"),
)


@rule("misleading-name", "info", "a norm's name says another place than the dataflow")
def misleading_name(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Ports go wrong over names: Llama's ``post_attention_layernorm`` is the pre-norm of its MLP."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    ends = {name for branches in _streams(evidence).values() for name in branches[-1].slots.get("stream", ())}
    for norm in evidence.norms:
        said = _name_says(norm)
        if said is not None and not (norm.name in ends and said == "at the end of the model"):
            groups.setdefault((norm.name.rsplit(".", 1)[-1], said, norm.placement), []).append(norm.name)
    for (name, said, placement), where in groups.items():
        yield finding(
            where,
            f"called {name!r}, which reads as {said}; by dataflow it is {_PLACES[placement]}",
            "trust the dataflow when porting weights or code",
        )


_PLACES = {
    "pre": "a pre-norm: it reads the stream and feeds a branch",
    "post": "a post-norm: it normalizes the stream itself",
    "output": "an output norm: it normalizes a branch before it is added",
    "final": "the final norm of the stream",
    "embedding": "an embedding norm, before the first block",
    "qk": "a norm of queries or keys",
    "inner": "inside a branch",
    "conv": "a norm between convolutions",
    "head": "in the head",
}


def _name_says(norm: NormRecord) -> str | None:
    """What the name claims, if the placement contradicts it."""
    if norm.functional:
        return None
    last = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", norm.name.rsplit(".", 1)[-1]).lower()
    for pattern, allowed, said in _SAYS:
        if re.search(pattern, last):
            return None if norm.placement in allowed else said
    return None


_DEEP = 12
"""Branches: six layers of two, where post-norm was first seen to need warm-up."""


@rule("deep-post-norm", "warning", "a deep post-norm stream is trained without warm-up or a scaled identity")
def deep_post_norm(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """The gradients of a post-norm's last layers are large at the start; warm-up or DeepNorm's alpha tames them."""
    if evidence.optimizer is None and evidence.scheduler is None:
        return
    for branches in _streams(evidence).values():
        post = [b for b in branches if b.placement == "post" and b.alpha <= 1]
        if len(post) >= _DEEP and not warms_up(evidence.scheduler, evidence.optimizer):
            yield finding(
                (post[-1].name,),
                f"is the last of {len(post)} post-norm branches with an unscaled identity, and the learning rate does "
                "not rise at the start",
                "warm the learning rate up over the first thousands of steps, or take DeepNorm "
                '(normkit.placement("deepnorm", ...)) or pre-norm',
            )


@rule("mixed-placement", "info", "branches of one stream are placed in different ways across its depth")
def mixed_placement(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """A schedule such as Mix-LN does so on purpose; a layer built from another class does not."""
    for branches in _streams(evidence).values():
        kinds: dict[str, list[str]] = {}
        for branch in branches:
            if branch.slots.keys() & {"input", "output", "stream"}:
                kinds.setdefault(branch.placement, []).append(branch.name)
        if len(kinds) < 2 or _alternates(branches):
            continue
        fewest = min(kinds, key=lambda kind: len(kinds[kind]))
        counts = ", ".join(f"{len(where)} {kind}" for kind, where in kinds.items())
        yield finding(
            kinds[fewest],
            f"is placed {fewest!r} on a stream whose branches are {counts}",
            "nothing, if a schedule such as Mix-LN was meant; else build all layers from one class",
        )


def _alternates(branches: list[BranchRecord]) -> bool:
    """Whether one pattern of a few sublayers repeats, so that each layer is as the others."""
    placements = [b.placement for b in branches]
    return any(
        len(placements) >= 2 * period and all(p == placements[i % period] for i, p in enumerate(placements))
        for period in range(1, 5)
    )


@rule("qk-norm-axis", "warning", "a norm of queries or keys runs over something else than a head, or all of them")
def qk_norm_axis(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Per head (Qwen 3) or over all heads (OLMo 2): the axis is part of the convention, and both sides share it."""
    by_attention: dict[int, dict[str, str]] = {}
    for norm in evidence.norms:
        if norm.placement != "qk" or norm.spec is None or norm.spec.axes != "features":
            continue
        met = evidence.reruns.attention_input(norm.name)
        if met is None or not isinstance(norm.spec.channel_dim, int):
            continue
        attention, head = met
        size = norm.input_shape[norm.spec.channel_dim] // norm.spec.groups
        if size == head:
            by_attention.setdefault(attention, {})[norm.name] = "each head"
        elif size % head == 0:
            by_attention.setdefault(attention, {})[norm.name] = "all heads together"
        else:
            yield finding(
                (norm.name,),
                f"normalizes over {size} features, where the attention's heads have {head}: neither one head nor "
                "several whole ones",
                "normalize over the last dim after the projection is cut into heads, or over the whole projection",
            )
    apart: dict[str, str] = {}
    for sides in by_attention.values():
        if len(set(sides.values())) > 1:
            apart |= sides
    if apart:
        yield finding(
            apart,
            "queries and keys of one attention are normalized over different sets ("
            + ", ".join(sorted(set(apart.values())))
            + ")",
            "normalize both per head, or both over all heads, as the weights were trained",
        )


def _streams(evidence: Evidence) -> dict[int, list[BranchRecord]]:
    streams: dict[int, list[BranchRecord]] = {}
    for branch in evidence.branches:
        streams.setdefault(branch.stream, []).append(branch)
    return streams


def _places(evidence: Evidence, branch: BranchRecord) -> list[str]:
    """The placements of a branch's norms."""
    inside = {name for slot in branch.slots.values() for name in slot}
    return [n.placement for n in evidence.norms if n.name in inside]


def _finals(evidence: Evidence, stream: int) -> list[NormRecord]:
    return [n for n in evidence.norms if n.placement == "final" and evidence.streams.get(n.name) == stream]
