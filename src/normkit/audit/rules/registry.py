"""How rules are declared and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from normkit.audit.result import SEVERITIES, BranchRecord, Finding, NormRecord, Severity


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a rule may look at."""

    model: nn.Module
    norms: tuple[NormRecord, ...]
    branches: tuple[BranchRecord, ...]
    streams: dict[str, int]
    """Norm name to the residual stream that it reads or writes, where it has one."""
    continued: frozenset[int]
    """Streams that are a stage of something longer: another stream starts from them."""


Check = Callable[[Evidence], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """One rule: an id, the severity of its findings, one sentence, and the check."""

    id: str
    severity: Severity
    summary: str
    check: Check


RULES: dict[str, Rule] = {}


def rule(id: str, severity: Severity, summary: str) -> Callable[[Callable[..., Iterator[Finding]]], Check]:
    """Register a check. It receives the evidence and a function that makes findings of this rule."""

    def register(function: Callable[..., Iterator[Finding]]) -> Check:
        def finding(where: Iterable[str], message: str, fix: str) -> Finding:
            return Finding(rule=id, severity=severity, where=tuple(where), message=message, fix=fix)

        def run(evidence: Evidence) -> Iterator[Finding]:
            return function(evidence, finding)

        if id in RULES:
            raise ValueError(f"two rules are called {id!r}")
        RULES[id] = Rule(id, severity, summary, run)
        return run

    return register


def check(evidence: Evidence) -> tuple[Finding, ...]:
    """Run every rule; the worst findings come first."""
    found = [finding for r in RULES.values() for finding in r.check(evidence)]
    return tuple(sorted(found, key=lambda f: -SEVERITIES.index(f.severity)))
