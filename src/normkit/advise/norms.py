"""Which normalization: one function for each kind of network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from normkit import spec as specs
from normkit.advise.evidence import Evidence, Results, paper
from normkit.advise.request import Request, groups_for
from normkit.spec import NormSpec

Form = Literal["plain", "sync", "frozen", "adaptive", "cell", "none"]
"""How the spec is used: as it is, synchronized over processes, with frozen statistics, with a gain that the condition
gives (adaLN-Zero), inside a recurrent cell, or not at all."""

LAYER, RMS = specs.TORCH_LAYER, specs.TORCH_RMS.replace(eps=1e-6)
BATCH, INSTANCE = specs.TORCH_BATCH, specs.TORCH_INSTANCE.replace(has_weight=True, has_bias=True)
WU_HE = paper("Wu and He 2018, arXiv:1803.08494", "GroupNorm's error does not depend on the batch")
SMALLEST_MEASURED = 2
CLAIMED_LEAST = 16


@dataclass(frozen=True)
class NormChoice:
    """A spec, how it is used, and why."""

    spec: NormSpec | None
    form: Form
    reason: str
    evidence: tuple[Evidence, ...]
    changes_if: str


def choose_norm(r: Request, results: Results) -> NormChoice:
    """The normalization for a request."""
    if r.stored is not None:
        return _stored(r, r.stored, results)
    if r.norm is not None:
        return _asked(r, results)
    if r.architecture == "cnn":
        return _convolutional(r, results)
    return _recurrent(results) if r.architecture == "rnn" else _transformer(r, results)


def _stored(r: Request, stored: NormSpec, results: Results) -> NormChoice:
    convention = f"the weights were trained as {r.checkpoint}: eps, gain convention and cast order are part of them"
    evidence = results.cite("gemma-offset-port") or (
        paper("Gemma Team 2024, arXiv:2403.08295", "stores gains as w with 1 + w meant"),
    )
    if stored.kind == "batch" and not stored.frozen and r.batch < least_batch(results)[0]:
        frozen = specs.FROZEN_BATCH.replace(rounding="after_gain", output_dtype="input", eps=stored.eps)
        return NormChoice(
            frozen,
            "frozen",
            f"{convention}; {_samples(r.batch, ' a device')} too few for new statistics, so the stored ones stay",
            (*least_batch(results)[1], paper("He et al. 2017 (Mask R-CNN), arXiv:1703.06870", "freezes BatchNorm")),
            f"with a batch of {least_batch(results)[0]} or more on a device, statistics can be trained on",
        )
    return NormChoice(stored, "plain", convention, evidence, "training from scratch, or after `normkit convert`")


def _asked(r: Request, results: Results) -> NormChoice:
    if r.norm == "batch":
        return _batch(r, results, "asked for", ())
    asked = {"layer": LAYER, "rms": RMS, "group": _group(r), "instance": INSTANCE}[r.norm or "layer"]
    if r.architecture == "cnn" and asked.axes == "features":
        asked = asked.replace(channel_dim=1)
    form: Form = "cell" if r.architecture == "rnn" else "plain"
    return NormChoice(asked, form, "asked for", (paper(_SOURCES[r.norm or "layer"]),), "another norm is asked for")


_SOURCES = {
    "layer": "Ba et al. 2016, arXiv:1607.06450",
    "rms": "Zhang and Sennrich 2019, arXiv:1910.07467",
    "group": "Wu and He 2018, arXiv:1803.08494",
    "instance": "Ulyanov et al. 2016, arXiv:1607.08022",
}


def _transformer(r: Request, results: Results) -> NormChoice:
    if r.task == "diffusion":
        return NormChoice(
            NormSpec(has_weight=False, eps=1e-6),
            "adaptive",
            "shift, gain and branch gate come from the time step and the condition, and start at zero (adaLN-Zero)",
            (paper("Peebles and Xie 2023 (DiT), arXiv:2212.09748", "adaLN-Zero is the best of four conditionings"),),
            "without a condition, a plain norm does",
        )
    if results.holds("rms-quality", unknown=True):
        evidence = results.cite("rms-quality") or (paper(_SOURCES["rms"], "as good as LayerNorm"),)
        return NormChoice(
            RMS,
            "plain",
            "as good as LayerNorm with half the parameters and one statistic less",
            (*evidence, *results.cite("rms-speed")),
            "if RMSNorm's quality were measurably below LayerNorm's (rms-quality), LayerNorm",
        )
    return NormChoice(
        LAYER,
        "plain",
        "RMSNorm's quality was not found to match it",
        results.cite("rms-quality"),
        "if RMSNorm's quality matched (rms-quality), RMSNorm",
    )


def _recurrent(results: Results) -> NormChoice:
    if results.holds("recurrent-layernorm", unknown=True):
        evidence = results.cite("recurrent-layernorm") or (paper(_SOURCES["layer"], "LayerNorm helps recurrent nets"),)
        return NormChoice(
            LAYER,
            "cell",
            "normalized gates train better, and each step has a statistic of its own",
            evidence,
            "if LayerNorm did not help recurrent networks (recurrent-layernorm), none",
        )
    return NormChoice(
        None,
        "none",
        "LayerNorm was not found to help a recurrent network",
        results.cite("recurrent-layernorm"),
        "if it were (recurrent-layernorm), a LayerNorm cell",
    )


def _convolutional(r: Request, results: Results) -> NormChoice:
    if r.task == "style":
        return NormChoice(
            INSTANCE,
            "plain",
            "the contrast of the content image should not pass into the result: each sample's channel is normalized",
            (paper(_SOURCES["instance"], "InstanceNorm makes feed-forward stylization work"),),
            "for other tasks, whose contrast carries meaning, BatchNorm or GroupNorm",
        )
    if r.task == "diffusion":
        return NormChoice(
            _group(r),
            "plain",
            "samples of one batch have different noise levels and must not share statistics",
            (paper("Ho et al. 2020, arXiv:2006.11239", "replaces weight normalization by GroupNorm"), WU_HE),
            "a transformer in place of a U-Net takes adaLN-Zero",
        )
    least, evidence = least_batch(results)
    enough = r.batch if r.task != "detect" else r.batch * r.devices
    if enough >= least or r.batch * r.devices >= least > r.batch:
        return _batch(
            r, results, f"at {r.batch} samples a device it trains well and costs nothing at inference", evidence
        )
    return NormChoice(
        _group(r),
        "plain",
        f"{_samples(r.batch * r.devices)} too few for statistics over the batch (at least {least})",
        (*evidence, WU_HE),
        f"from {least} samples on (batchnorm-batch-size, batchnorm-batch-1-2), BatchNorm",
    )


def _batch(r: Request, results: Results, reason: str, evidence: tuple[Evidence, ...]) -> NormChoice:
    least, measured = least_batch(results)
    channel_dim, instead = (1, "GroupNorm") if r.architecture == "cnn" else (-1, "LayerNorm")
    spec = BATCH.replace(channel_dim=channel_dim)
    evidence = evidence or measured or (paper("Ioffe and Szegedy 2015, arXiv:1502.03167"),)
    if r.devices > 1 and r.batch < least:
        return NormChoice(
            spec,
            "sync",
            f"{_samples(r.batch, ' a device')} too few; the {r.batch * r.devices} of {r.devices} processes are not",
            (*evidence, paper("Peng et al. 2018 (MegDet), arXiv:1711.07240", "BatchNorm across devices")),
            f"with {least} samples on each device, plain BatchNorm; with few in all, {instead}",
        )
    return NormChoice(spec, "plain", reason, evidence, f"below {least} samples (batchnorm-batch-size), {instead}")


def _samples(count: int, where: str = "") -> str:
    return f"{count} sample{'' if count == 1 else 's'}{where} {'is' if count == 1 else 'are'}"


def _group(r: Request) -> NormSpec:
    return specs.TORCH_GROUP.replace(groups=groups_for(r.width))


def least_batch(results: Results) -> tuple[int, tuple[Evidence, ...]]:
    """From how many samples BatchNorm is as good as GroupNorm, and what says so.

    Where the claim "needs at least 16" holds in full, 16; else the smallest size whose measured rise of the error has
    its interval's lower end at or under one point; and at least 3 where GroupNorm is better at 1 and 2.
    """
    evidence = (*results.cite("batchnorm-batch-size"), *results.cite("batchnorm-batch-1-2"))
    rises = {
        int(name.split("_")[1]): value
        for name, value in results.numbers("batchnorm-batch-size").items()
        if name.startswith("batch_") and name.endswith("_low") and name.split("_")[1].isdigit()
    }
    if not rises:
        least = CLAIMED_LEAST if results.holds("batchnorm-batch-size", unknown=True) else SMALLEST_MEASURED
    else:
        hurt = [CLAIMED_LEAST - 1] if results.outcome("batchnorm-batch-size") == "holds" else []
        hurt += [size for size, low in rises.items() if low > 1.0]
        least = min((s for s in [*rises, CLAIMED_LEAST] if all(s > h for h in hurt)), default=CLAIMED_LEAST)
    if results.holds("batchnorm-batch-1-2", unknown=True):
        least = max(least, 3)
    return least, evidence or (WU_HE,)
