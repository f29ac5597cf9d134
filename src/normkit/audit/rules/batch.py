"""Batch statistics: which ones the audited run used, and whether they were ever learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from normkit.audit.result import Finding, NormRecord, names
from normkit.audit.rules.registry import Evidence, rule


@rule("batch-statistics-at-inference", "error", "an eval-mode model has norms that use the batch's own statistics")
def batch_statistics_at_inference(evidence: Evidence, finding: Callable[..., Finding]) -> Iterator[Finding]:
    """A sample's output then depends on the samples beside it."""
    if evidence.model.training:
        return
    norms = [n for n in evidence.norms if n.batch_statistics and n.spec is not None and n.spec.running is not None]
    if norms:
        yield finding(
            names(norms),
            "is in training mode inside a model in eval mode: it normalizes by this batch's statistics, so a sample's "
            "output depends on its batch mates, and it moves its running statistics",
            "call model.eval() after the last model.train(), or these modules' .eval()",
        )


@rule("training-mode", "info", "the model was audited in training mode and has batch statistics")
def training_mode(evidence: Evidence, finding: Callable[..., Finding]) -> Iterator[Finding]:
    """Right for training; at inference, eval() is missing."""
    norms = [n for n in evidence.norms if n.batch_statistics and n.spec is not None and n.spec.running is not None]
    if evidence.model.training and norms:
        yield finding(
            names(norms),
            "normalizes by batch statistics, since the model is in training mode",
            "for inference call model.eval() first",
        )


@rule("running-statistics-untouched", "warning", "running statistics still have their initial values, 0 and 1")
def running_statistics_untouched(evidence: Evidence, finding: Callable[..., Finding]) -> Iterator[Finding]:
    """In eval mode the norm then changes nothing: its input is not normalized."""
    norms = [n for n in evidence.norms if _untouched(n)]
    if norms:
        yield finding(
            names(norms),
            "has running statistics of exactly mean 0 and variance 1 in every channel: they were never updated, and in "
            "eval mode the norm does not normalize",
            "load the checkpoint's buffers, or run training batches (or recompute the statistics over data) first",
        )


def _untouched(norm: NormRecord) -> bool:
    mean, var = running_statistics(norm)
    if mean is None or var is None or mean.is_meta or var.is_meta or mean.numel() == 0:
        return False
    return bool(torch.all(mean == 0)) and bool(torch.all(var == 1))


def running_statistics(norm: NormRecord) -> tuple[Tensor | None, Tensor | None]:
    """The stored mean and variance of a norm, where it has them."""
    found: list[Tensor | None] = []
    for role in ("running_mean", "running_var"):
        value: object = norm.module
        path = norm.parameters.get(role)
        for part in path.split(".") if path else ():
            value = getattr(value, part, None)
        found.append(value if path and isinstance(value, Tensor) else None)
    return found[0], found[1]
