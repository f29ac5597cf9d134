"""Write the results of docs/bench.md and its picture from docs/bench/results.csv: ``python docs/bench.py --write``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normkit.bench.results import COPY, Result, read
from normkit.bench.summary import Cell, Line, by, cells, left_out, line

DOCS = Path(__file__).parent
PAGE, RESULTS, PICTURE = DOCS / "bench.md", DOCS / "bench" / "results.csv", DOCS / "bench" / "ratios.svg"
BEGIN, END = "<!-- results: written by docs/bench.py -->", "<!-- end of results -->"
GRID = 900


def text(about: dict[str, str], results: list[Result]) -> str:
    """The results' part of the page."""
    found = cells(results)
    parts = [_state(results), _facts(about), *_tables(found)]
    parts += [f"![ratios](bench/{PICTURE.name})", _notable(found), _behind(found), _left_out(results)]
    return "\n\n".join(parts)


def _tables(found: list[Cell]) -> list[str]:
    sets: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("norm", lambda c: c.norm),
        ("mode", lambda c: c.mode),
        ("dtype", lambda c: c.dtype),
        ("threads", lambda c: c.threads),
    )
    tables = []
    for name, key in sets:
        lines = by(found, key)
        if name == "norm" or len(lines) > 1:
            tables.append(_table(name, [*lines, line("all", found)] if name == "norm" else lines))
    tables.append(_table("the fastest other takes", _by_duration(found)))
    return tables


def _by_duration(found: list[Cell]) -> list[Line]:
    """Apart, what is bound by the cost of a call and what by memory."""
    steps = {"under 50 µs": 50.0, "50 to 300 µs": 300.0, "longer": float("inf")}
    sets: dict[str, list[Cell]] = {f"{way}, {step}": [] for way in ("forward", "train") for step in steps}
    for c in found:
        step = next(name for name, limit in steps.items() if c.times[c.fastest] < limit)
        sets[f"{'train' if c.case.mode == 'train' else 'forward'}, {step}"].append(c)
    return [line(name, some) for name, some in sets.items() if some]


def _state(results: list[Result]) -> str:
    count = len({r.case for r in results})
    what = "The whole grid" if count == GRID else f"A part of the grid: of {GRID} cells"
    names = list(dict.fromkeys(r.provider for r in results if r.provider != COPY))
    return f"{what}, {count}, with {', '.join(names)}."


def _facts(about: dict[str, str]) -> str:
    return "; ".join(f"{key} {value}" for key, value in about.items()) + "."


def _markdown(columns: str, rows: list[tuple[Any, ...]]) -> str:
    names = columns.split("; ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, cells_)) + " |" for cells_ in lines)


def _table(name: str, lines: list[Line]) -> str:
    rows = []
    for entry in lines:
        fastest = ", ".join(f"{other} {n}" for other, n in entry.fastest.items())
        means = (f"{entry.ratio:.2f}", f"{entry.eager:.2f}", f"{entry.copies:.2f}")
        rows.append((entry.name, entry.cells, *means, entry.behind, fastest))
    return _markdown(f"{name}; cells; / fastest other; / torch; copies; behind; the fastest other, how often", rows)


def _notable(found: list[Cell]) -> str:
    """The cells that are spoken of most: 64 MB, and torch's RMSNorm in bfloat16."""
    rows = [
        (
            c.case.name,
            f"{c.times['normkit'] / 1e3:.2f}",
            f"{c.copies:.2f}",
            f"{c.fastest} {c.ratio:.2f}",
            f"{c.eager:.1f}",
        )
        for c in found
        if c.case.shape == (4096, 4096) and c.case.norm in ("layer_norm", "rms_norm") and c.case.dtype != "float16"
    ]
    return _markdown("large rows; ms; copies; / fastest other; / torch", rows)


def _behind(found: list[Cell]) -> str:
    behind = sorted((c for c in found if c.behind), key=lambda c: c.ratio)
    if not behind:
        return "No cell is more than 5 % behind the fastest other provider."
    rows = [
        (c.case.name, f"{c.times['normkit']:.1f}", f"{c.fastest} {c.times[c.fastest]:.1f}", f"{c.ratio:.2f}")
        for c in behind
    ]
    head = f"{len(behind)} of {len(found)} cells are more than 5 % behind, in microseconds:"
    return f"{head}\n\n{_markdown('case; normkit; fastest other; ratio', rows)}"


def _left_out(results: list[Result]) -> str:
    same: dict[tuple[str, ...], list[Result]] = {}
    for r in left_out(results):
        same.setdefault((r.provider, r.case.norm, r.case.dtype, r.note), []).append(r)
    if not same:
        return "No provider was wrong or failed."
    rows = []
    for (provider, norm, dtype, note), some in same.items():
        off = f"off by up to {max(r.error for r in some):.2g} of the largest value"
        rows.append((provider, f"{norm}, {dtype}", len(some), off if note == "wrong" else note.replace("|", " ")))
    return f"Left out, as wrong or failing:\n\n{_markdown('provider; norm; cells; why', rows)}"


def written(page: str, results: str) -> str:
    """The page with its results replaced."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{results}\n\n{END}{after}"


def stale() -> list[str]:
    """What does not agree with the results file."""
    page = PAGE.read_text(encoding="utf-8")
    return [PAGE.name] if page != written(page, text(*read(RESULTS))) else []


if __name__ == "__main__":
    if "--write" in sys.argv:
        from normkit.bench.picture import draw

        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), text(*read(RESULTS))), encoding="utf-8")
        draw(read(RESULTS)[1], PICTURE)
    print("\n".join(stale()) or "up to date")
