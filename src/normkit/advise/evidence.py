"""What advice rests on: verdicts of the lab, and papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from normkit.lab.claim import Verdict
from normkit.lab.verdicts import committed, from_json


@dataclass(frozen=True)
class Evidence:
    """One thing that speaks for a choice."""

    kind: Literal["lab", "paper"]
    ref: str
    """The claim's id in the lab's report, or the paper."""
    says: str = ""


def paper(ref: str, says: str = "") -> Evidence:
    """Evidence from the literature."""
    return Evidence("paper", ref, says)


class Results:
    """Verdicts by claim id; asking for one is how advice comes to rest on it."""

    def __init__(self, verdicts: Mapping[str, Verdict]) -> None:
        self._verdicts = dict(verdicts)

    @classmethod
    def committed(cls) -> Results:
        """The verdicts of the report in docs/, as shipped with the package; none where a build has no report."""
        return cls(committed())

    @classmethod
    def from_file(cls, path: Path) -> Results:
        """Verdicts that ``normkit lab report`` wrote as verdicts.json.

        Raises:
            ValueError: no file of that form.
        """
        return cls(from_json(path))

    def holds(self, claim: str, *, unknown: bool) -> bool:
        """Whether a claim holds, at least within limits; ``unknown`` where there is no verdict."""
        found = self._verdicts.get(claim)
        return unknown if found is None else found.outcome in ("holds", "holds within limits")

    def outcome(self, claim: str) -> str | None:
        """A verdict's outcome, if there is one."""
        found = self._verdicts.get(claim)
        return None if found is None else found.outcome

    def numbers(self, claim: str) -> dict[str, float]:
        """All numbers of a verdict."""
        found = self._verdicts.get(claim)
        return {} if found is None else {k: float(v) for k, v in found.numbers.items() if isinstance(v, int | float)}

    def cite(self, claim: str) -> tuple[Evidence, ...]:
        """The verdict as evidence; nothing where there is none."""
        found = self._verdicts.get(claim)
        return () if found is None else (Evidence("lab", claim, f"{found.outcome}: {found.because}"),)

    def changed(self, **outcomes: str) -> Results:
        """The same with other outcomes, to see what advice rests on; names with underscores for hyphens."""
        made = dict(self._verdicts)
        for name, outcome in outcomes.items():
            claim = name.replace("_", "-")
            old = made.get(claim)
            made[claim] = Verdict(outcome, "as if", {} if old is None else old.numbers)  # type: ignore[arg-type]
        return Results(made)
