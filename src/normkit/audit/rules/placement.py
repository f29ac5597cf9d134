"""Placement: what the residual streams lack, have twice, or are named against."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from normkit.audit.result import BranchRecord, Finding, NormRecord
from normkit.audit.rules.registry import Evidence, rule
from normkit.placement import PLACEMENTS


@rule("missing-final-norm", "warning", "a pre-norm stream ends without a norm")
def missing_final_norm(evidence: Evidence, finding: Callable[..., Finding]) -> Iterator[Finding]:
    """The stream grows with depth; without a last norm the head sees its scale."""
    for stream, branches in _streams(evidence).items():
        wanting = [b for b in branches if b.placement in PLACEMENTS and PLACEMENTS[b.placement].final_norm]
        if len(branches) < 2 or branches[-1] not in wanting or stream in evidence.continued:
            continue
        if all(place == "conv" for b in branches for place in _places(evidence, b)):
            continue  # convolutional networks end in pooling, and need none
        if not _finals(evidence, stream):
            yield finding(
                (branches[-1].name,),
                f"is the last of {len(branches)} residual branches ({branches[-1].placement}), and no norm follows it: "
                "the head reads an unnormalized stream, whose scale grows with depth",
                "add a final norm after the last block (in torch.nn.TransformerEncoder: the norm= argument)",
            )


@rule("double-final-norm", "warning", "a post-norm stream is normalized twice at its end")
def double_final_norm(evidence: Evidence, finding: Callable[..., Finding]) -> Iterator[Finding]:
    """The last block's own norm already ends the stream; the second one mostly undoes its gain."""
    for stream, branches in _streams(evidence).items():
        last = branches[-1]
        finals = _finals(evidence, stream)
        if finals and last.slots.get("stream"):
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
def misleading_name(evidence: Evidence, finding: Callable[..., Finding]) -> Iterator[Finding]:
    """Ports go wrong over names: Llama's ``post_attention_layernorm`` is the pre-norm of its MLP."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for norm in evidence.norms:
        said = _name_says(norm)
        if said is not None:
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
