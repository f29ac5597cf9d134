"""What a report says, as plain values for the templates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from normkit.lab.claim import OUTCOMES, Claim, Row
from normkit.lab.report import figures
from normkit.lab.setups.statistics import t_interval
from normkit.lab.verdicts import Decision, decide

STATES = (*OUTCOMES, "no verdict")
MOST_CELLS = 24
"""Longer tables of measurements are cut in the page; the results file has them all."""


@dataclass(frozen=True)
class Entry:
    """One claim on the page."""

    id: str
    kind: str
    state: str
    statement: str
    source: str
    criterion: str
    because: str
    numbers: list[tuple[str, str]]
    columns: list[str]
    measurements: list[list[str]]
    left_out: int
    """How many lines of measurements the page does not show."""
    figure: str
    runs: str
    failures: list[str]


@dataclass(frozen=True)
class Report:
    """The whole page."""

    entries: list[Entry]
    counts: list[tuple[str, int]]
    environments: list[str]
    measured: str
    """The days on which the measurements were made."""
    seconds: str
    quick: bool
    """Whether any verdict rests on the quick form."""


def build(claims: Iterable[Claim], rows: list[Row]) -> Report:
    """Judge and describe these claims from the rows of a results file."""
    decisions = [decide(claim, rows) for claim in claims]
    used = [row for d in decisions for row in d.rows]
    entries = [_entry(d) for d in decisions]
    counts = Counter(e.state for e in entries)
    return Report(
        entries=entries,
        counts=[(state, counts[state]) for state in STATES if counts[state]],
        environments=_environments(used),
        measured=_days(used),
        seconds=_duration(sum(row.seconds for row in used)),
        quick=any(d.quick and d.rows for d in decisions),
    )


def _entry(decision: Decision) -> Entry:
    claim = decision.claim
    columns, lines = _measurements(decision)
    return Entry(
        id=claim.id,
        kind=claim.kind,
        state=decision.state,
        statement=claim.statement,
        source=claim.source,
        criterion=claim.criterion,
        because=decision.reason if decision.verdict is None else decision.verdict.because,
        numbers=[] if decision.verdict is None else [(k, number(v)) for k, v in decision.verdict.numbers.items()],
        columns=columns,
        measurements=lines[:MOST_CELLS],
        left_out=max(0, len(lines) - MOST_CELLS),
        figure=figures.of_decision(decision),
        runs=_runs(decision),
        failures=[f"{row.cell} seed {row.seed}: {row.error}" for row in decision.failures],
    )


def _runs(decision: Decision) -> str:
    if not decision.rows:
        return ""
    cells = len({str(row.cell) for row in decision.rows})
    form = "quick form" if decision.quick and decision.claim.kind == "measured" else ""
    seeds = f"{decision.seeds} seeds" if decision.seeds > 1 else ""
    parts = [_plural(cells, "setting"), seeds, form, _duration(sum(row.seconds for row in decision.rows))]
    return ", ".join(part for part in parts if part)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("s" if count != 1 else "")


def _measurements(decision: Decision) -> tuple[list[str], list[list[str]]]:
    """One line a setting: its values, and each number of the result as mean ± half of its interval over seeds."""
    by_cell: dict[str, list[Row]] = {}
    for row in decision.rows:
        by_cell.setdefault(str(row.cell), []).append(row)
    names = list(dict.fromkeys(name for row in decision.rows for name in row.cell))
    results = [n for n in dict.fromkeys(n for r in decision.rows for n in r.result) if _is_shown(decision.rows, n)]
    lines = [
        [*(number(rows[0].cell.get(n, "")) for n in names), *(_over_seeds(rows, n) for n in results)]
        for rows in by_cell.values()
    ]
    return [*names, *results], lines


def _is_shown(rows: Iterable[Row], name: str) -> bool:
    """Scalars, short texts and short dicts of them; curves and long lists are for the plot."""
    return all(len(number(row.result.get(name, ""))) <= 60 for row in rows)


def _over_seeds(rows: list[Row], name: str) -> str:
    values = [row.result.get(name, "") for row in rows]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if len(values) == 1 or not numeric or len(set(values)) == 1:
        return number(values[0]) if len({str(v) for v in values}) == 1 else " / ".join(map(number, values))
    interval = t_interval(values)
    if not math.isfinite(interval.half):
        return " / ".join(map(number, values))
    return f"{interval.mean:.4g} ± {interval.half:.2g}"


def number(value: Any) -> str:
    """A value for readers."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ") if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {number(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(number, value))
    return str(value)


def _environments(rows: Iterable[Row]) -> list[str]:
    shown = Counter(
        "{processor}, {cores} cores, {system}; normkit {normkit}, torch {torch}, Python {python}".format_map(
            {"processor": "unknown processor", **row.versions}
        )
        for row in rows
    )
    return (
        list(shown) if len(shown) == 1 else [f"{text} ({count} measurements)" for text, count in sorted(shown.items())]
    )


def _days(rows: Iterable[Row]) -> str:
    days = sorted({row.started[:10] for row in rows})
    return "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "under a second"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
