"""docs/bench.md says what docs/bench/results.csv holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from normkit.bench.results import read
from normkit.bench.summary import cells, geometric_mean
from tests.pages import script

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_agrees_with_the_results() -> None:
    assert script("docs/bench.py").stale() == [], "run python docs/bench.py --write"


def test_the_page_holds_the_means_and_every_cell_that_is_behind() -> None:
    page = (DOCS / "bench.md").read_text(encoding="utf-8")
    found = cells(read(DOCS / "bench" / "results.csv")[1])
    ratio, eager = (geometric_mean(getattr(c, name) for c in found) for name in ("ratio", "eager"))
    assert f"| all | {len(found)} | {ratio:.2f} | {eager:.2f} |" in page
    for c in found:
        assert (f"| {c.case.name} | {c.times['normkit']:.1f} |" in page) == c.behind


def test_another_result_makes_the_page_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("docs/bench.py")
    lines = made.RESULTS.read_text(encoding="utf-8").splitlines(keepends=True)
    row = next(k for k, text in enumerate(lines) if ",normkit," in text)
    fields = lines[row].split(",")
    fields[7] = str(float(fields[7]) * 100)
    (tmp_path / "results.csv").write_text("".join([*lines[:row], ",".join(fields), *lines[row + 1 :]]))
    monkeypatch.setattr(made, "RESULTS", tmp_path / "results.csv")
    assert made.stale() == ["bench.md"]


def test_only_the_whole_grid_is_called_so() -> None:
    made = script("docs/bench.py")
    results = read(made.RESULTS)[1]
    one = results[0].case
    less = made._state([r for r in results if r.case != one])
    assert less.startswith("A part of the grid") and "whole" not in less
    whole = len({r.case for r in results}) == made.GRID
    assert made._state(results).startswith("The whole grid" if whole else "A part of the grid")


def test_every_cell_has_a_duration() -> None:
    made = script("docs/bench.py")
    found = cells(read(made.RESULTS)[1])
    assert sum(entry.cells for entry in made._by_duration(found)) == len(found)
