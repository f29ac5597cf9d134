"""Numbers: what the values that flowed through the norms say; most need data (``audit(model, ..., data=batches)``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from normkit.audit.numbers.record import DEAD, OUTLIER, BranchNumbers, NormNumbers
from normkit.audit.result import Finding
from normkit.audit.rules.registry import Evidence, MakeFinding, rule

GROWTH = 100.0
WEAK = 0.01
LARGE_LOGIT = 50.0
"""exp(50) is past float32's range of ratios: the softmax is one-hot, and has no gradient."""
GRADIENT_RATIO = 1000.0


@rule("nonfinite-activations", "error", "NaN or infinity reaches a norm")
def nonfinite_activations(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """The first norm that sees one is near where it was made. Looked at in the audited run, and in given data."""
    seen = {name for name, values in evidence.reruns.inputs.items() if not values.finite}
    if evidence.numbers is not None:
        seen |= {n.name for n in evidence.numbers.norms if n.nonfinite}
    where = [n.name for n in evidence.norms if n.name in seen]
    if where:
        yield finding(
            where,
            f"receives NaN or infinite values; the first to do so is {where[0]}",
            f"look at what runs just before {where[0]}: an overflow in half precision, a division by zero, a poisoned "
            "weight",
        )


@rule("stream-growth", "warning", f"the residual stream grows more than {GROWTH:g} times over its depth")
def stream_growth(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Pre-norm blocks write at the stream's own scale or above: late layers add little, half precision overflows."""
    for branches in _by_stream(evidence):
        first, last = branches[0], branches[-1]
        if first.stream_rms > 0 and last.stream_rms > GROWTH * first.stream_rms:
            yield finding(
                (last.name,),
                f"reads a stream of RMS {last.stream_rms:.3g}, which was {first.stream_rms:.3g} at {first.name}: "
                f"{last.stream_rms / first.stream_rms:.0f} times as much",
                "scale residual branches or their initialization with depth, or normalize their outputs "
                '(normkit.placement("sandwich"), "scaled")',
            )


def _by_stream(evidence: Evidence) -> Iterator[Sequence[BranchNumbers]]:
    streams: dict[int, list[BranchNumbers]] = {}
    for branch in evidence.numbers.branches if evidence.numbers is not None else ():
        streams.setdefault(branch.stream, []).append(branch)
    for branches in streams.values():
        if len(branches) > 1:
            yield sorted(branches, key=lambda b: b.depth)


@rule("weak-branch", "info", f"a residual branch adds less than {WEAK:.0%} of what is on the stream")
def weak_branch(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Its layer can nearly be left out: deep pre-norm models have many such."""
    where = [b for branches in _by_stream(evidence) for b in branches if b.share < WEAK]
    if where:
        least = min(where, key=lambda b: b.share)
        yield finding(
            [b.name for b in where],
            f"adds less than {WEAK:.0%} of what the stream holds (least: {least.share:.2%} at {least.name})",
            "nothing, at the start of training of a model whose branches start at zero; else these layers do little: "
            "prune them, or scale the norms of deep layers (LayerNorm Scaling)",
        )


@rule("dead-gains", "info", f"channels of a norm have a gain below {DEAD:.0%} of its median")
def dead_gains(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """What such channels carry is gone behind the norm: they can be pruned, or were decayed away."""
    found = [n for n in _norms(evidence) if n.gain is not None and n.gain.dead]
    if found:
        count = sum(len(n.gain.dead) for n in found if n.gain is not None)
        yield finding(
            [n.name for n in found],
            f"has {count} channels in all whose gain is all but 0",
            "nothing, if pruning is meant; else see whether weight decay acts on gains (decay-on-gains)",
        )


@rule("outlier-gains", "warning", f"channels of a norm have a gain above {OUTLIER:g} times its median")
def outlier_gains(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """They make the outliers that a quantized projection behind the norm clips."""
    found = [n for n in _norms(evidence) if n.gain is not None and n.gain.outliers]
    if found:
        count = sum(len(n.gain.outliers) for n in found if n.gain is not None)
        most = max(n.gain.max / n.gain.median for n in found if n.gain is not None and n.gain.median > 0)
        yield finding(
            [n.name for n in found],
            f"has {count} channels in all whose gain is far above the others' (up to {most:.0f} times the median): "
            "one scale for all channels loses the small ones when activations are quantized",
            "quantize per channel, or move the scale into the next weight first (SmoothQuant), minding 1 + w gains",
        )


@rule("activation-outliers", "warning", f"a few channels before a norm exceed {OUTLIER:g} times the typical one")
def activation_outliers(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Massive activations set the statistic, and quantized inputs lose all else."""
    found = [n for n in _norms(evidence) if n.outlier_channels]
    if found:
        worst = max(found, key=lambda n: n.outlier_ratio)
        yield finding(
            [n.name for n in found],
            f"receives channels far above the others (up to {worst.outlier_ratio:.0f} times the median channel's RMS, "
            f"at {worst.name})",
            "keep the residual stream in bfloat16 or float32, and quantize only behind the norm, per channel",
        )


def _norms(evidence: Evidence) -> tuple[NormNumbers, ...]:
    return () if evidence.numbers is None else evidence.numbers.norms


@rule("large-attention-logits", "warning", f"attention logits exceed {LARGE_LOGIT:g}, and no norm bounds them")
def large_attention_logits(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Queries and keys that grow end in one-hot attention without gradients, and then in divergence."""
    attentions = () if evidence.numbers is None else evidence.numbers.attentions
    found = [a for a in attentions if a.logit_max > LARGE_LOGIT and not a.qk_norm]
    if found:
        yield finding(
            [a.name for a in found],
            f"forms attention logits of up to {max(a.logit_max for a in found):.0f} without a norm of queries and keys",
            "normalize queries and keys per head, cap the logits, or lower the learning rate of their projections",
        )


@rule("gradient-imbalance", "warning", f"gradients at a stream's norms differ more than {GRADIENT_RATIO:g} times")
def gradient_imbalance(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Vanishing or exploding over depth: some layers learn as if the others stood still."""
    streams: dict[int, list[NormNumbers]] = {}
    places = {n.name: n.placement for n in evidence.norms}
    for norm in _norms(evidence):
        stream = evidence.streams.get(norm.name)
        if stream is not None and norm.gradient_rms and places.get(norm.name) in ("pre", "post", "output"):
            streams.setdefault(stream, []).append(norm)
    for norms in streams.values():
        least = min(norms, key=lambda n: n.gradient_rms or 0.0)
        most = max(norms, key=lambda n: n.gradient_rms or 0.0)
        low, high = least.gradient_rms or 0.0, most.gradient_rms or 0.0
        if low > 0 and high > GRADIENT_RATIO * low:
            yield finding(
                (least.name, most.name),
                f"the gradient is {low:.2g} at the input of {least.name} and {high:.2g} at {most.name}",
                "check the factors on identity path and branches, the initialization and the placement "
                "(pre-norm and scaled branches keep gradients even)",
            )
