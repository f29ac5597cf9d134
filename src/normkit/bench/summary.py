"""What the rows say: ratios to the fastest other provider and to torch, geometric means, cells that are behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from normkit.bench.grid import Case
from normkit.bench.results import COPY, Result

NOISE = 0.05
"""A cell is behind where another provider is faster by more than this."""


@dataclass
class Cell:
    """One case: the times of the providers that were right."""

    case: Case
    times: dict[str, float] = field(default_factory=dict)
    copies: float = math.nan
    """normkit's time over that of a copy."""

    @property
    def others(self) -> dict[str, float]:
        return {name: t for name, t in self.times.items() if name not in ("normkit", COPY)}

    @property
    def fastest(self) -> str:
        """The fastest other provider."""
        return min(self.others, key=lambda name: self.others[name])

    @property
    def ratio(self) -> float:
        """How many times as long the fastest other provider takes; NaN where there is none."""
        return min(self.others.values(), default=math.nan) / self.times["normkit"]

    @property
    def eager(self) -> float:
        """How many times as long torch's own function takes; NaN where it has none."""
        return self.times.get("torch", math.nan) / self.times["normkit"]

    @property
    def behind(self) -> bool:
        return self.ratio < 1 - NOISE


def cells(results: Iterable[Result]) -> list[Cell]:
    """The cases in which normkit was timed, and another provider."""
    found: dict[Case, Cell] = {}
    for r in results:
        if not math.isnan(r.microseconds):
            cell = found.setdefault(r.case, Cell(r.case))
            cell.times[r.provider] = r.microseconds
            if r.provider == "normkit":
                cell.copies = r.copies
    return [c for c in found.values() if "normkit" in c.times and c.others]


def geometric_mean(values: Iterable[float]) -> float:
    """Of the values that are numbers; NaN of none."""
    logs = [math.log(v) for v in values if not math.isnan(v)]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


@dataclass
class Line:
    """One line of the table: a set of cells."""

    name: str
    cells: int
    ratio: float
    """Geometric mean of the ratio to the fastest other."""
    eager: float
    copies: float
    behind: int
    fastest: dict[str, int]
    """How often each other provider was the fastest one."""


def line(name: str, over: list[Cell]) -> Line:
    """The table's line for these cells."""
    fastest: dict[str, int] = {}
    for c in over:
        fastest[c.fastest] = fastest.get(c.fastest, 0) + 1
    return Line(
        name,
        len(over),
        geometric_mean(c.ratio for c in over),
        geometric_mean(c.eager for c in over),
        geometric_mean(c.copies for c in over),
        sum(c.behind for c in over),
        dict(sorted(fastest.items(), key=lambda item: -item[1])),
    )


def by(over: list[Cell], key: Callable[[Case], Any]) -> list[Line]:
    """A line for each value of a property of the cases, in order of appearance."""
    sets: dict[str, list[Cell]] = {}
    for c in over:
        sets.setdefault(str(key(c.case)), []).append(c)
    return [line(name, part) for name, part in sets.items()]


def left_out(results: Iterable[Result]) -> list[Result]:
    """Providers that were wrong or failed."""
    return [r for r in results if r.note]


def movement(first: Iterable[Result], second: Iterable[Result]) -> tuple[int, float, float]:
    """Of two runs: how many cells both have, and the factor by which their ratios moved: median, 90th percentile."""
    before = {c.case: c.ratio for c in cells(first)}
    moved = sorted(math.exp(abs(math.log(c.ratio / before[c.case]))) for c in cells(second) if c.case in before)
    if not moved:
        return 0, math.nan, math.nan
    return len(moved), moved[len(moved) // 2], moved[int(0.9 * (len(moved) - 1))]


def to_dict(about: dict[str, str], results: list[Result]) -> dict[str, Any]:
    """Everything, for JSON."""
    found = cells(results)
    return {
        "environment": about,
        "summary": [vars(line_) for line_ in [line("all", found), *by(found, lambda c: c.norm)]] if found else [],
        "behind": [{"case": c.case.name, "ratio": c.ratio, "fastest": c.fastest} for c in found if c.behind],
        "results": [{k: None if v == "" else v for k, v in r.row().items()} for r in results],
    }
