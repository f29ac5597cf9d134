"""What an audit returns: norms, branches, findings, and their published JSON form."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from normkit.audit.find.unreached import Unreached
from normkit.audit.identify import Identification
from normkit.audit.numbers.record import Numbers
from normkit.placement import NormPosition
from normkit.spec import Kind, NormSpec

SCHEMA_VERSION = 1
Severity = Literal["info", "warning", "error"]
"""``error``: wrong numbers or NaN can follow. ``warning``: training or porting can go wrong. ``info``: good to know."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, kw_only=True)
class NormRecord:
    """One norm of the audited model, however often it is called."""

    name: str
    """Qualified module name; for an inline norm, the module whose forward holds it, and a number."""
    class_name: str
    kind: Kind
    spec: NormSpec | None
    """None where NormSpec cannot say what it computes; ``reason`` then does."""
    reason: str
    placement: NormPosition
    calls: int = 1
    functional: bool = False
    """Written inline as operators, not a module."""
    stream: int | None = None
    """The residual stream that it reads or writes, where there is one."""
    input_shape: tuple[int, ...] = ()
    input_dtype: str = ""
    batch_statistics: bool = False
    """It divided by the batch's own statistics in the audited run."""
    half_mismatch: float | None = None
    """The share of half-precision outputs that the spec does not give bit for bit; None where that was not tried."""
    module: nn.Module | None = field(default=None, repr=False, compare=False)
    identification: Identification | None = field(default=None, repr=False, compare=False)
    """What was measured, with the parts that the module's tensors and arguments have in it."""
    parameters: dict[str, str] = field(default_factory=dict, repr=False)
    """Role (weight, bias, running_mean, running_var) to the attribute path inside the module."""
    location: tuple[str, int] | None = field(default=None, repr=False, compare=False)
    """Source file and line of the model that runs it; where only a library's code does, of the norm's class."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; see `Audit.to_dict`."""
        described: dict[str, Any] = {} if self.spec is None else self.spec.to_dict()
        return {
            "name": self.name,
            "class": self.class_name,
            **described,
            "kind": self.kind,
            "placement": self.placement,
            "calls": self.calls,
            "functional": self.functional,
            "stream": self.stream,
            "input_shape": list(self.input_shape),
            "input_dtype": self.input_dtype,
            "batch_statistics": self.batch_statistics,
            "half_mismatch": self.half_mismatch,
            "reason": self.reason,
            "location": None if self.location is None else {"file": self.location[0], "line": self.location[1]},
        }


@dataclass(frozen=True, kw_only=True)
class BranchRecord:
    """One residual branch, in order of depth within its stream."""

    name: str
    placement: str
    stream: int
    slots: dict[str, list[str]]
    """Slot (input, inner, output, stream) to the names of the norms found in it."""
    inside: tuple[str, ...] = ()
    """Norms that the branch holds in no slot: of queries and keys, in its middle."""
    alpha: float = 1.0
    branch_scale: float | str = 1.0
    """lambda: a number, or ``"vector"`` or ``"scalar"`` where it is learned."""
    input_gain: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; see `Audit.to_dict`."""
        return {
            "name": self.name,
            "placement": self.placement,
            "stream": self.stream,
            "slots": self.slots,
            "inside": list(self.inside),
            "alpha": self.alpha,
            "branch_scale": self.branch_scale,
            "input_gain": self.input_gain,
        }


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a rule found."""

    rule: str
    severity: Severity
    where: tuple[str, ...]
    """Names of the norms (or branches) concerned."""
    message: str
    fix: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; see `Audit.to_dict`."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "where": list(self.where),
            "message": self.message,
            "fix": self.fix,
        }


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Everything an audit found out about one model."""

    model: str
    """The model's class."""
    norms: tuple[NormRecord, ...]
    branches: tuple[BranchRecord, ...]
    findings: tuple[Finding, ...]
    parameters: int = 0
    device: str = "cpu"
    failures: tuple[str, ...] = ()
    """Submodules whose forward raised, each with the reason: what lies behind them was not seen."""
    unreached: tuple[Unreached, ...] = ()
    """Norm modules of which nothing ran, each with the reason."""
    guesses: tuple[str, ...] = ()
    """Values made up on the meta device, where the model's control flow asked for one."""
    numbers: Numbers | None = None
    """What was measured on data, if any was given."""
    sites: Any = field(default=None, repr=False, compare=False)
    """Where later runs of the model are looked at (`normkit.audit.numbers.sites.Sites`)."""

    def __getitem__(self, name: str) -> NormRecord:
        """The norm of that name; KeyError names the known ones."""
        for norm in self.norms:
            if norm.name == name:
                return norm
        raise KeyError(f"no norm named {name!r}; known are {', '.join(n.name for n in self.norms)}")

    def __str__(self) -> str:
        """The tables that ``normkit audit`` prints, without colour."""
        from io import StringIO

        from rich.console import Console

        from normkit.audit.report.terminal import show

        text = StringIO()
        show(self, Console(file=text, width=140, color_system=None), title=self.model)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """The report of ``normkit audit --html`` in a notebook, in a frame of its own."""
        from html import escape

        from normkit.audit.report.html import page

        style = "width:100%;height:70vh;border:1px solid #8886;border-radius:6px"
        return (
            f'<iframe title="normkit audit" style="{style}" srcdoc="{escape(page(self, title=self.model))}"></iframe>'
        )

    def worst(self) -> Severity | None:
        """The highest severity among the findings."""
        found = [SEVERITIES.index(f.severity) for f in self.findings]
        return SEVERITIES[max(found)] if found else None

    def to_dict(self) -> dict[str, Any]:
        """The published schema: ``model``, ``norms``, ``branches``, ``findings`` and how the run went.

        Each of ``norms`` has NormSpec's fields (where one describes it) and ``name``, ``class``, ``kind``,
        ``placement``, ``calls``, ``functional``, ``reason``. ``numbers`` is null unless data was given.
        """
        return {
            "schema": SCHEMA_VERSION,
            "model": self.model,
            "device": self.device,
            "parameters": self.parameters,
            "norms": [n.to_dict() for n in self.norms],
            "branches": [b.to_dict() for b in self.branches],
            "findings": [f.to_dict() for f in self.findings],
            "failures": list(self.failures),
            "unreached": [u.to_dict() for u in self.unreached],
            "guesses": list(self.guesses),
            "numbers": None if self.numbers is None else self.numbers.to_dict(),
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """`to_dict` as JSON text, also written to ``path`` if given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def names(norms: Sequence[NormRecord]) -> tuple[str, ...]:
    """The norms' names, as a finding's ``where``."""
    return tuple(n.name for n in norms)


def collapse(name: str) -> str:
    """A qualified name with its numbers taken out: repeated layers share one."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
