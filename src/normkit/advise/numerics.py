"""eps, precision, weight decay, and what batch statistics need."""

from __future__ import annotations

from normkit.advise.evidence import Results, paper
from normkit.advise.norms import NormChoice
from normkit.advise.request import Request
from normkit.advise.stack import Said

RMS_PAPER = paper("Zhang and Sennrich 2019, arXiv:1910.07467")
_PRECISION_REASONS = {
    "float64": "nothing is gained by rounding in between",
    "float32": "statistics in float32 are right at every size that occurs",
    "bfloat16": "8 bits of mantissa are too few for a mean of many squares",
    "float16": "squares overflow float16 from 256 on",
}


def choose_eps(r: Request, chosen: NormChoice, results: Results) -> Said:
    """The stabilizer."""
    assert chosen.spec is not None
    eps = f"{chosen.spec.eps:g}"
    if r.stored is not None:
        return Said(eps, "the checkpoint's own (its config overrides this default): another changes the outputs",
                    results.cite("eps-defaults") or (RMS_PAPER,), "training from scratch")  # fmt: skip
    half = r.dtype in ("float16", "bfloat16")
    reason = "far below a trained activation's mean square, far above float32's rounding"
    if half:
        reason += "; added in float32, since a small eps vanishes in float16"
    cited = (*(results.cite("eps-half") if half else ()), *results.cite("eps-defaults"))
    return Said(eps, reason, cited or (paper("Ba et al. 2016, arXiv:1607.06450"),),
                "a statistic formed in float16 (at least 1e-4); activations whose mean square is near eps")  # fmt: skip


def choose_precision(r: Request, chosen: NormChoice, results: Results) -> Said:
    """In what precision the norm computes."""
    assert chosen.spec is not None
    order = {
        "before_gain": "rounded before the gain",
        "after_gain": "rounded once at the end",
        "none": "in the input's dtype",
    }
    if r.dtype == "float64":
        value = "float64 throughout"
    elif r.dtype == "float32":
        value = "float32 throughout"
    else:
        value = f"{r.dtype} in and out, statistics in float32, {order[chosen.spec.rounding]}"
        if chosen.spec.rounding == "none":
            value = f"{r.dtype} throughout, as the checkpoint's family does"
    evidence = results.cite("fp16-overflow") or (
        paper("Micikevicius et al. 2018, arXiv:1710.03740", "reductions in float32"),
    )
    reason = _PRECISION_REASONS[r.dtype]
    if r.stored is not None:
        reason = "the checkpoint's cast order is part of it"
    return Said(value, reason, evidence, "another dtype, or a checkpoint with its own cast order")


def choose_speed(r: Request, chosen: NormChoice, results: Results) -> Said:
    """What makes the norm fast where it runs."""
    assert chosen.spec is not None
    evidence = results.cite("time-against-flops") or (
        paper("Ivanov et al. 2021, arXiv:2007.00072", "norms are bound by memory, not by arithmetic"),
    )
    if r.hardware == "cpu":
        return Said("normkit's kernels (normkit env says whether they loaded)", "a norm's cost is its memory traffic",
                    evidence, "without a compiler at installation, plain PyTorch")  # fmt: skip
    if chosen.spec.kind == "rms" and chosen.spec.rounding == "before_gain" and r.dtype in ("float16", "bfloat16"):
        return Said("torch.compile", "torch has no fused operator that rounds before the gain", evidence,
                    "a convention that rounds once runs on torch's fused operator")  # fmt: skip
    return Said("torch's fused operator, which normkit.nn picks", "it computes the same spec", evidence,
                "a convention that torch does not have: torch.compile")  # fmt: skip


def choose_decay(results: Results) -> Said:
    """How gains and biases are treated by weight decay."""
    return Said(
        "none on gains and biases (normkit.param_groups)",
        "decay pulls a plain gain to 0 and a (1 + w) gain to 1: the same setting means two things",
        results.cite("gain-offset-decay") or (paper("Loshchilov and Hutter 2019, arXiv:1711.05101"),),
        "if decay on gains is wanted, store them as 1 + w, so that it pulls to 1",
    )


def choose_batch_handling(r: Request, chosen: NormChoice, results: Results) -> Said | None:
    """What statistics over a batch need, where there are any."""
    if chosen.spec is None or chosen.spec.axes != "batch" or chosen.spec.frozen:
        return None
    if r.variable_length:
        return Said(
            "mask=: padding counts in no statistic",
            "padded positions would pull mean and variance towards the padding",
            results.cite("batchnorm-padding") or (paper("Ioffe and Szegedy 2015, arXiv:1502.03167"),),
            "without padding, no mask; a norm over features needs none",
        )
    if r.streaming:
        return Said(
            "eval(), with running statistics from data like what is streamed",
            "one sample has no statistics of its own, and running ones fit only their own kind of data",
            results.cite("batchnorm-decode") or results.cite("batchnorm-train-eval")
            or (paper("Ioffe and Szegedy 2015, arXiv:1502.03167"),),
            "with a norm over features there is nothing to fit",
        )  # fmt: skip
    return Said(
        "drop_last in training, eval() at inference",
        "a last batch of a few samples has statistics unlike the others', and running ones must be used at inference",
        results.cite("batchnorm-train-eval") or (paper("Ioffe and Szegedy 2015, arXiv:1502.03167"),),
        "with a norm over features there is nothing to switch",
    )
