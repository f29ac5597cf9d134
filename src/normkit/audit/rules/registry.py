"""How rules are declared, chosen and run.

Severities follow one criterion. ``error``: wrong numbers or NaN can follow in what was audited. ``warning``: training,
or porting to other code, can go wrong. ``info``: good to know.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from normkit.audit.result import SEVERITIES, BranchRecord, Finding, NormRecord, Severity
from normkit.audit.trace.wrappers import unwrapped

if TYPE_CHECKING:
    from normkit.audit.load import LoadReport
    from normkit.audit.numbers import Numbers
    from normkit.audit.reruns import Reruns


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
    reruns: Reruns
    """What running the model, or one of its norms, again tells; each run is made when first asked for."""
    never_ran: tuple[str, ...] = ()
    """Norm modules that the audited run did not reach."""
    optimizer: Any = None
    scheduler: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config as plain values, nested ones under their parts' names; empty where it has none."""
    loading: LoadReport | None = None
    """What reading the checkpoint left out."""
    numbers: Numbers | None = None
    """What was measured on given data."""

    def tensor(self, norm: NormRecord, role: str) -> Tensor | None:
        """A norm's weight, bias, running_mean or running_var; None where it has none."""
        path = norm.parameters.get(role)
        if path is None:
            return None
        value: object = self.model if norm.functional or norm.module is None else norm.module
        for part in path.split("."):
            value = getattr(unwrapped(value) if isinstance(value, nn.Module) else value, part, None)
        return value if isinstance(value, Tensor) else None

    def values(self, norm: NormRecord, role: str) -> Tensor | None:
        """The same, if numbers can be read from it."""
        from normkit.audit.identify.probe import has_values

        tensor = self.tensor(norm, role)
        return tensor.detach() if tensor is not None and tensor.numel() > 0 and has_values(tensor) else None


Check = Callable[[Evidence], Iterator[Finding]]
MakeFinding = Callable[[Iterable[str], str, str], Finding]


@dataclass(frozen=True)
class Rule:
    """One rule: an id, the severity of its findings, one sentence, and the check."""

    id: str
    severity: Severity
    summary: str
    topic: str
    """The file that it is written in: precision, convention, placement, batch, training, numbers, speed, coverage."""
    check: Check
    opt_in: bool = False
    """Only run if it is asked for, because it takes long."""

    def page(self) -> str:
        """The rule's page in Markdown: what, why, a minimal example, how to fix, source."""
        body = (resources.files("normkit.audit.rules") / "pages" / f"{self.id}.md").read_text(encoding="utf-8")
        when = ", only if selected" if self.opt_in else ""
        return f"# {self.id}\n\n{self.severity} ({self.topic}{when}): {self.summary}.\n\n{body}"


RULES: dict[str, Rule] = {}


def rule(
    id: str, severity: Severity, summary: str, *, opt_in: bool = False
) -> Callable[[Callable[..., Iterator[Finding]]], Check]:
    """Register a check. It receives the evidence and a function that makes findings of this rule."""

    def register(function: Callable[..., Iterator[Finding]]) -> Check:
        def finding(where: Iterable[str], message: str, fix: str) -> Finding:
            return Finding(rule=id, severity=severity, where=tuple(where), message=message, fix=fix)

        def run(evidence: Evidence) -> Iterator[Finding]:
            return function(evidence, finding)

        if id in RULES:
            raise ValueError(f"two rules are called {id!r}")
        RULES[id] = Rule(id, severity, summary, function.__module__.rsplit(".", 1)[-1], run, opt_in)
        return run

    return register


def chosen(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[Rule]:
    """The rules to run.

    Args:
        select: ids or topics; none means every rule that need not be asked for.
        ignore: ids or topics to leave out again.

    Raises:
        ValueError: a name that is neither; the message has the nearest ones.
    """
    wanted, unwanted = _named("select", select), _named("ignore", ignore)
    rules = [r for r in RULES.values() if (r.id in wanted if wanted else not r.opt_in)]
    return [r for r in rules if r.id not in unwanted]


def _named(argument: str, names: Iterable[str]) -> set[str]:
    if isinstance(names, str):
        names = (names,)
    topics = {r.topic for r in RULES.values()}
    found: set[str] = set()
    for name in names:
        if name not in RULES and name not in topics:
            near = difflib.get_close_matches(name, [*RULES, *topics], n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "see `normkit rules`"
            raise ValueError(f"{argument} has {name!r}, which is no rule and no topic; {hint}")
        found |= {r.id for r in RULES.values() if name in (r.id, r.topic)}
    return found


def check(evidence: Evidence, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """Run some rules; the worst findings come first."""
    found = [finding for r in rules for finding in r.check(evidence)]
    return tuple(sorted(found, key=lambda f: -SEVERITIES.index(f.severity)))
