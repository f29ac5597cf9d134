"""Verdicts: from a results file to what each claim has come to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.errors import described
from normkit.lab.claim import Claim, Row, Verdict, encode, task_key

COMMITTED = Path(__file__).with_name("committed.json")
"""The verdicts of the report in docs/, as shipped with the package."""


@dataclass(frozen=True)
class Decision:
    """What a results file says about one claim."""

    claim: Claim
    verdict: Verdict | None
    reason: str
    """Why there is no verdict; empty where there is one."""
    rows: tuple[Row, ...]
    """The rows that were judged, or are there so far; by cell, then by seed."""
    failures: tuple[Row, ...]
    quick: bool
    """Whether these are rows of the quick form."""

    @property
    def state(self) -> str:
        """The outcome, or ``"no verdict"``."""
        return "no verdict" if self.verdict is None else self.verdict.outcome

    @property
    def seeds(self) -> int:
        """How many seeds were run."""
        return len({row.seed for row in self.rows})


def decide(claim: Claim, rows: Iterable[Row]) -> Decision:
    """Judge a claim from the rows of a results file: by those of the full form where they are complete.

    There is no verdict while a measurement is missing or failed, or with fewer seeds than the claim asks for.
    """
    own = [row for row in rows if row.claim == claim.id]
    full = _of_form(claim, own, quick=False)
    if full.verdict is not None or not any(row.quick for row in own):
        return full
    quick = _of_form(claim, own, quick=True)
    return full if quick.verdict is None and len(full.rows) > len(quick.rows) else quick


def _of_form(claim: Claim, rows: list[Row], *, quick: bool) -> Decision:
    known = {task_key(claim.id, cell, seed, quick) for cell in claim.cells(quick) for seed in _seeds(rows, quick)}
    by_key = {row.key: row for row in rows if row.quick == quick}
    cells = [(task_key(claim.id, cell, 0, quick), cell) for cell in claim.cells(quick)]
    order = {key: n for n, (key, _) in enumerate(cells)}
    good = [row for key, row in by_key.items() if key in known and row.error is None]
    good.sort(key=lambda row: (order[task_key(claim.id, row.cell, 0, quick)], row.seed))
    failed = [row for key, row in by_key.items() if key in known and row.error is not None]
    seeds = {row.seed for row in good} | {row.seed for row in failed}

    def without(reason: str) -> Decision:
        return Decision(claim, None, reason, tuple(good), tuple(failed), quick)

    if failed:
        first = failed[0]
        return without(f"{len(failed)} of {len(cells) * len(seeds)} measurements failed; the first: {first.error}")
    missing = len(cells) * max(len(seeds), claim.seeds) - len(good)
    if not good:
        return without("not measured yet")
    if len(seeds) < claim.seeds:
        return without(f"{len(seeds)} of at least {claim.seeds} seeds measured")
    if missing:
        return without(f"{missing} of {len(cells) * len(seeds)} measurements are missing")
    try:
        verdict = claim.judge(good)
    except Exception as error:
        return without(f"its judge raised {described(error)}")
    return Decision(claim, verdict, "", tuple(good), (), quick)


def _seeds(rows: list[Row], quick: bool) -> set[int]:
    return {row.seed for row in rows if row.quick == quick}


def to_json(decisions: Iterable[Decision]) -> str:
    """The verdicts as JSON, by claim: what ``normkit advise --results`` reads. Claims without one are left out."""
    verdicts: dict[str, Any] = {
        d.claim.id: {"outcome": d.verdict.outcome, "because": d.verdict.because, "numbers": d.verdict.numbers}
        for d in decisions
        if d.verdict is not None
    }
    return json.dumps({"verdicts": encode(verdicts)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(path: Path) -> dict[str, Verdict]:
    """The verdicts that `to_json` wrote, by claim.

    Raises:
        ValueError: no file of that form.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {k: Verdict(v["outcome"], v["because"], v["numbers"]) for k, v in data["verdicts"].items()}
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the lab's verdicts; write it with `normkit lab report`") from error


def committed() -> dict[str, Verdict]:
    """The verdicts of the report in docs/; none where a build has no report."""
    return from_json(COMMITTED) if COMMITTED.exists() else {}
