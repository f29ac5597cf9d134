"""Precision: what the dtype that a statistic is formed in does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from normkit.audit.result import Finding, NormRecord, names
from normkit.audit.rules.registry import Evidence, rule


def _statistic_in_float16(norm: NormRecord) -> bool:
    """Whether the norm squares its input in float16: it runs in float16 and never leaves it."""
    if norm.spec is None or norm.input_dtype != "float16" or norm.spec.rounding != "none":
        return False
    return norm.batch_statistics or not (norm.spec.frozen or norm.spec.running is not None)


@rule("statistic-overflow", "error", "the statistic is formed in float16, whose squares overflow from 256 on")
def statistic_overflow(evidence: Evidence, finding: Callable[..., Finding]) -> Iterator[Finding]:
    """float16 x = 300: the square is inf, and the norm returns 0 where the answer is about 1."""
    norms = [n for n in evidence.norms if _statistic_in_float16(n)]
    if norms:
        yield finding(
            names(norms),
            "squares its input in float16: one value of magnitude 256 or more overflows, and the row comes out as 0 "
            "(or NaN)",
            "form the statistic in float32: x.float() before the square, or normkit.nn.RMSNorm / LayerNorm; "
            "or run in bfloat16",
        )


@rule("eps-vanishes", "error", "eps is below the smallest number of the dtype that it is added in")
def eps_vanishes(evidence: Evidence, finding: Callable[..., Finding]) -> Iterator[Finding]:
    """1e-8 and 1e-12 are 0 in float16: a row of zeros divides by zero."""
    by_eps: dict[str, list[str]] = {}
    for norm in evidence.norms:
        if _statistic_in_float16(norm) and norm.spec is not None and _vanishes(norm.spec.eps):
            by_eps.setdefault(f"{norm.spec.eps:.3g}", []).append(norm.name)
    for eps, where in by_eps.items():
        yield finding(
            where,
            f"adds eps = {eps} in float16, where it is 0: a row of zeros gives NaN",
            "form the statistic in float32, or take an eps of at least 1e-4 in float16",
        )


def _vanishes(eps: float) -> bool:
    return eps > 0 and torch.tensor(eps, dtype=torch.float16).item() == 0
