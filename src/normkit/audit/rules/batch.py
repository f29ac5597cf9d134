"""Batch statistics: which ones the audited run used, what reached them, and whether they were ever learnt."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from normkit.audit.result import Finding, NormRecord, names
from normkit.audit.rules.registry import Evidence, MakeFinding, rule

SMALL_BATCH = 8
"""Samples in a batch below which its statistics are too noisy to train on (Wu and He 2018, figure 1)."""
_FAR = 3.0
"""In standard deviations: a batch of data whose means lie so far from the running ones is not what they were for."""
_WIDE = 9.0


def _on_batch(evidence: Evidence) -> list[NormRecord]:
    return [n for n in evidence.norms if n.batch_statistics and n.spec is not None and n.spec.running is not None]


@rule("batch-statistics-at-inference", "error", "an eval-mode model has norms that use the batch's own statistics")
def batch_statistics_at_inference(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """A sample's output then depends on the samples beside it."""
    norms = _on_batch(evidence)
    if norms and not evidence.model.training:
        yield finding(
            names(norms),
            "is in training mode inside a model in eval mode: it normalizes by this batch's statistics, so a sample's "
            "output depends on its batch mates, and it moves its running statistics",
            "call model.eval() after the last model.train(), or these modules' .eval()",
        )


@rule("training-mode", "info", "the model was audited in training mode and has batch statistics")
def training_mode(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Right for training; at inference, eval() is missing."""
    norms = _on_batch(evidence)
    if evidence.model.training and norms:
        yield finding(
            names(norms),
            "normalizes by batch statistics, since the model is in training mode",
            "for inference call model.eval() first",
        )


@rule("small-batch", "warning", f"batch statistics are formed of fewer than {SMALL_BATCH} samples in training")
def small_batch(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """The noise of the statistics grows as the batch shrinks, and inference uses others."""
    norms = [
        n for n in evidence.norms
        if evidence.model.training and n.batch_statistics and n.spec is not None and n.spec.axes == "batch"
        and n.input_shape[0] < SMALL_BATCH
    ]  # fmt: skip
    if norms:
        yield finding(
            names(norms),
            f"takes its statistics of {min(n.input_shape[0] for n in norms)} samples: training is noisy, and what it "
            "learns differs from what inference does with the running ones",
            "train on larger batches, synchronize over processes (SyncBatchNorm), or use GroupNorm or Batch Renorm",
        )


@rule("single-element-statistic", "error", "a centered norm has one element for each statistic")
def single_element_statistic(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """x less its own mean is 0: the output is the bias, whatever comes in."""
    norms = [n for n in evidence.norms if _set_size(n) == 1 and n.spec is not None and n.spec.centered]
    if norms:
        yield finding(
            names(norms),
            f"takes the mean and variance of one element each (input {list(norms[0].input_shape)}): its output is its "
            "bias, whatever comes in",
            "give it more elements: more samples or space, fewer groups, or a norm over features",
        )


def _set_size(norm: NormRecord) -> int | None:
    """How many elements share a statistic; None for stored statistics and what is not known."""
    spec, shape = norm.spec, norm.input_shape
    if spec is None or not shape or spec.frozen or (spec.running is not None and not norm.batch_statistics):
        return None
    if isinstance(spec.channel_dim, tuple):
        return math.prod(shape[d] for d in spec.channel_dim)
    channel = spec.channel_dim % len(shape)
    space = math.prod(n for d, n in enumerate(shape) if d not in (0, channel))
    return {
        "features": shape[channel] // spec.groups,
        "batch": shape[0] * space,
        "instance": space,
        "group": space * (shape[channel] // spec.groups),
    }[spec.axes]


@rule("padding-in-statistics", "error", "padding reaches a norm's statistic")
def padding_in_statistics(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """[3, 5, 0, 0] with mask 1100 has mean 4, not 2. Looked for where a mask is among the inputs."""
    where = evidence.reruns.padding
    if where:
        yield finding(
            where,
            "gives valid positions other outputs when the padding holds something else (the model was run with two "
            "paddings): how far a sample is padded changes its numbers",
            "give the norm the mask (normkit.nn's batch, instance and group norms take mask=), or pad nothing: "
            "batches of one length",
        )


@rule("batch-mates", "error", "in eval mode a sample's output depends on the samples beside it")
def batch_mates(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Found by running with other samples in the first one's company."""
    if evidence.model.training:
        return
    told = {n.name for n in _on_batch(evidence)}
    where = [name for name in evidence.reruns.mates if name not in told]
    if where:
        yield finding(
            where,
            "gives a sample another output when other samples stand beside it (the model was run with both), though "
            "the model is in eval mode",
            "keep running statistics (track_running_stats=True), or normalize within the sample",
        )


@rule("running-statistics-untouched", "warning", "running statistics still have their initial values, 0 and 1")
def running_statistics_untouched(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """In eval mode the norm then changes nothing: its input is not normalized."""
    norms = [n for n in evidence.norms if _untouched(evidence, n)]
    if norms and not evidence.model.training:
        yield finding(
            names(norms),
            "has running statistics of exactly mean 0 and variance 1 in every channel: they were never updated, and in "
            "eval mode the norm does not normalize",
            "load the checkpoint's buffers, or run training batches (or recompute the statistics over data) first",
        )


def _untouched(evidence: Evidence, norm: NormRecord) -> bool:
    mean, var = evidence.values(norm, "running_mean"), evidence.values(norm, "running_var")
    if mean is None or var is None:
        return False
    return bool(torch.all(mean == 0)) and bool(torch.all(var == 1))


@rule("running-statistics-poisoned", "error", "running statistics hold NaN, infinity or a negative variance")
def running_statistics_poisoned(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """One NaN in one training batch stays in the running average for good."""
    norms = []
    for norm in evidence.norms:
        stored = [evidence.values(norm, role) for role in ("running_mean", "running_var")]
        broken = any(t is not None and not bool(torch.isfinite(t).all()) for t in stored)
        var = stored[1]
        if broken or (var is not None and bool((var < 0).any())):
            norms.append(norm)
    if norms:
        yield finding(
            names(norms),
            "has running statistics that are NaN, infinite or negative: those channels are lost in eval mode, and no "
            "later batch brings them back",
            "recompute them: reset_running_stats(), then training-mode batches without gradients; skip batches that "
            "are not finite (normkit.nn.BatchNorm*d can)",
        )


@rule("running-statistics-stale", "warning", "running statistics are far from those of the given data")
def running_statistics_stale(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Of another domain, scale or preprocessing than the data now. Needs data."""
    if evidence.numbers is None:
        return
    found = []
    for norm in evidence.norms:
        mean, var = evidence.values(norm, "running_mean"), evidence.values(norm, "running_var")
        seen = evidence.numbers.norm(norm.name)
        if mean is None or var is None or seen is None or seen.channel_mean is None or seen.channel_var is None:
            continue
        if mean.shape != seen.channel_mean.shape or _untouched(evidence, norm):
            continue
        spread = var.double().clamp_min(1e-12)
        off = ((seen.channel_mean - mean.double()).abs() / spread.sqrt()).median()
        ratio = (seen.channel_var.clamp_min(1e-12) / spread).log().abs().median()
        if float(off) > _FAR or float(ratio) > math.log(_WIDE):
            found.append(norm)
    if found:
        yield finding(
            names(found),
            f"has running statistics that do not describe the given data: the typical channel's mean is more than "
            f"{_FAR:g} deviations away, or its variance more than {_WIDE:g} times larger or smaller",
            "check that the data is preprocessed as in training; else recompute the statistics over such data",
        )
