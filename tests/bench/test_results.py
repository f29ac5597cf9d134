"""The results file: rows go there and back, a half-written end is cut off, another machine's file is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from normkit.bench import results as files
from normkit.bench.grid import DTYPES, MODES, NORMS, Case, cases
from normkit.bench.results import COPY, Result
from normkit.bench.summary import by, cells, geometric_mean, left_out, line, movement, to_dict

ABOUT = {"processor": "made up", "torch": "2.13.0"}


def rows(case: Case, **times: float) -> list[Result]:
    made = [Result(case, name, microseconds=t, copies=t / 2, error=1e-7) for name, t in times.items()]
    return [*made, Result(case, COPY, microseconds=2.0, copies=1.0)]


CASES = [Case("rms_norm", (5, 7), "float32", "fresh", 1), Case("group_norm", (2, 4, 3, 3), "float16", "train", 2, True)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "results.csv"
    files.start(path, ABOUT)
    for case in CASES:
        files.append(path, rows(case, normkit=1.0, torch=4.0))
    return path


def test_rows_and_environment_go_there_and_back(path: Path) -> None:
    wrong = [Result(CASES[0], "jax", error=0.25, note="wrong"), Result(CASES[0], COPY, microseconds=3.14159265)]
    files.append(path, wrong)
    about, found = files.read(path)
    assert about == ABOUT
    assert [r.case for r in found] == [CASES[0]] * 3 + [CASES[1]] * 3 + [CASES[0]] * 2
    assert (found[6].provider, found[6].error, found[6].note) == ("jax", 0.25, "wrong")
    assert math.isnan(found[6].microseconds) and found[7].microseconds == 3.1416
    assert found[1].microseconds == 4 and found[1].copies == 2


def test_every_cut_of_a_file_can_be_resumed(path: Path) -> None:
    whole = path.read_bytes()
    head = whole.index(b"\nnorm,") + 1
    first = whole.index(f"fresh,1,{COPY}".encode())
    after_head = whole.index(b"\n", head) + 1
    after_first = whole.index(b"\n", first) + 1
    for end in range(after_head, len(whole) + 1):
        path.write_bytes(whole[:end])
        found = files.resume(path, ABOUT)
        kept = after_head if end < after_first else after_first if end < len(whole) else end
        assert path.read_bytes() == whole[:kept]
        assert len(found) == {after_head: 0, after_first: 3, len(whole): 6}[kept]


def test_a_file_of_other_versions_is_refused(path: Path) -> None:
    with pytest.raises(files.ResultsError, match=r"torch 2\.13\.0 \(now 2\.14\.0\)"):
        files.resume(path, {**ABOUT, "torch": "2.14.0"})
    with pytest.raises(files.ResultsError, match="jax None"):
        files.resume(path, {**ABOUT, "jax": "0.9"})


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "# torch: 2\n"])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(files.ResultsError):
        files.read(path)
    with pytest.raises(files.ResultsError, match="cannot read"):
        files.read(tmp_path / "none.csv")


def test_a_row_that_is_none_is_refused_with_its_line(path: Path) -> None:
    path.write_text(path.read_text().replace("fresh,1,torch,4.0", "fresh,1,torch,four"))
    with pytest.raises(files.ResultsError, match=r"results\.csv:5 "):
        files.read(path)


def test_the_grid_is_what_the_documentation_says() -> None:
    grid = list(cases())
    assert len(grid) == len(set(grid)) == 2 * (5 * 4 + 5 * 3 * 2) * len(DTYPES) * len(MODES) == 900
    assert {c.norm for c in grid} == set(NORMS)
    only = list(cases(norms=("layer_norm",), shapes=((3, 5), (2, 4, 3, 3)), threads=(1,)))
    assert {c.shape for c in only} == {(3, 5)}
    assert list(cases(norms=("qk_rms_norm",), shapes=((3, 100),))) == []


def test_ratios_are_to_the_fastest_other_that_was_right() -> None:
    a, b = CASES
    found = [
        *rows(a, normkit=2.0, torch=16.0, jax=4.0),
        Result(a, "openvino", note="wrong", error=1.0),
        *rows(b, normkit=2.0, torch=1.0),
        *rows(Case("rms_norm", (9, 9), "float32", "fresh", 1), normkit=1.0),  # nobody else: no cell
    ]
    first, second = cells(found)
    assert (first.fastest, first.ratio, first.eager, first.behind) == ("jax", 2.0, 8.0, False)
    assert (second.fastest, second.ratio, second.eager, second.behind) == ("torch", 0.5, 0.5, True)
    whole = line("all", [first, second])
    assert (whole.cells, whole.ratio, whole.eager, whole.behind) == (2, 1.0, pytest.approx(2.0), 1)
    assert whole.fastest == {"jax": 1, "torch": 1}
    assert [entry.name for entry in by([first, second], lambda c: c.norm)] == ["rms_norm", "group_norm"]
    assert [r.provider for r in left_out(found)] == ["openvino"]
    made = to_dict(ABOUT, found)
    assert made["behind"] == [{"case": b.name, "ratio": 0.5, "fastest": "torch"}]
    assert made["summary"][0]["ratio"] == 1.0 and len(made["results"]) == len(found)


def test_a_cell_without_torch_counts_in_no_mean_of_torch() -> None:
    found = rows(CASES[0], normkit=1.0, jax=2.0) + rows(CASES[1], normkit=1.0, torch=3.0)
    assert line("all", cells(found)).eager == pytest.approx(3.0)
    assert math.isnan(geometric_mean([]))


def test_movement_between_runs_is_a_factor_whichever_way() -> None:
    first = rows(CASES[0], normkit=1.0, torch=4.0) + rows(CASES[1], normkit=1.0, torch=2.0)
    second = rows(CASES[0], normkit=1.0, torch=2.0) + rows(CASES[1], normkit=1.0, torch=4.0)
    count, middle, high = movement(first, second)
    assert (count, middle, high) == (2, pytest.approx(2.0), pytest.approx(2.0))
    assert movement(first, [])[0] == 0
