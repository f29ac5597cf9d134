"""Running: each measurement once, kept at once, whatever stops the run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from normkit.lab.claim import Row
from normkit.lab.executors import Inline
from normkit.lab.run import ResultsError, appending, read, run, tasks_of
from normkit.lab.verdicts import decide
from tests.lab import claims_for_tests as made

ROOT = Path(__file__).parents[2]
CELLS = [{"a": a} for a in range(3)]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    claim = made.make(made.number, CELLS, seeds=2)
    new = run(tasks_of([claim]), tmp_path / "r.jsonl", Inline())
    assert read(tmp_path / "r.jsonl") == new
    assert len(new) == 6
    assert all(row.result["infinite"] == float("inf") for row in new)
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    strict = [json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON")) for line in lines]
    assert strict[0]["result"]["infinite"] == "Infinity"


def test_a_seed_gives_the_same_numbers_and_leaves_the_generator_and_threads_alone(tmp_path: Path) -> None:
    claim = made.make(made.number, CELLS)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first, second = (run(tasks_of([claim]), tmp_path / name, Inline()) for name in ("a.jsonl", "b.jsonl"))
    assert [row.result for row in first] == [row.result for row in second]
    assert {row.result["threads"] for row in first} == {1}
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(tasks_of([made.make(made.number, CELLS[:2])]), path, Inline())
    assert [row.cell for row in run(tasks_of([made.make(made.number, CELLS)]), path, Inline())] == CELLS[2:]
    assert [row.seed for row in run(tasks_of([made.make(made.number, CELLS[:1], seeds=3)]), path, Inline())] == [1, 2]
    assert len(run(tasks_of([made.make(made.number, CELLS[:1])], quick=True), path, Inline())) == 1
    assert run(tasks_of([made.make(made.number, CELLS)]), path, Inline()) == []


def test_fresh_measures_again_and_the_later_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    claim = made.make(made.number, CELLS[:1])
    (old,) = run(tasks_of([claim]), path, Inline())
    with appending(path) as append:
        append(dataclasses.replace(old, result={"value": 500.0}))
    assert decide(claim, read(path)).state == "wrong as stated"
    run(tasks_of([claim]), path, Inline(), fresh=True)
    (row,) = read(path)
    assert row.result == old.result


def test_what_failed_is_tried_again_and_then_counts(tmp_path: Path) -> None:
    path, marks = tmp_path / "r.jsonl", tmp_path / "mark"
    claim = made.make(made.once, [{"a": a, "marks": str(marks)} for a in range(3)])
    rows = run(tasks_of([claim]), path, Inline())
    assert [row.error for row in rows] == [None, "RuntimeError: not yet", None]
    decision = decide(claim, read(path))
    assert decision.verdict is None and "1 of 3 measurements failed" in decision.reason
    marks.touch()
    assert [row.error for row in run(tasks_of([claim]), path, Inline())] == [None]
    assert len(read(path)) == 3 and decide(claim, read(path)).state == "holds"


def test_a_result_that_json_cannot_hold_is_a_failed_row(tmp_path: Path) -> None:
    claim = made.make(_tensor, [{}])
    (row,) = run(tasks_of([claim]), tmp_path / "r.jsonl", Inline())
    assert row.error is not None and "not JSON serializable" in row.error


def _tensor(*, seed: int) -> dict[str, object]:
    return {"value": torch.zeros(2)}


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_half_written_last_line_is_healed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.jsonl"
    claim = made.make(made.number, CELLS)
    whole = run(tasks_of([claim]), path, Inline())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:cut])
    assert read(path) == whole[:2]
    assert [row.cell for row in run(tasks_of([claim]), path, Inline())] == [whole[2].cell]
    assert [row.result for row in read(path)] == [row.result for row in whole]
    assert len(path.read_text().splitlines()) == 3


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"claim": "x"}\n')
    with pytest.raises(ResultsError, match=r"r\.jsonl:1 is not a row"):
        read(path)


@pytest.mark.parametrize(
    "change", [{"seed": []}, {"seed": True}, {"quick": 1}, {"cell": None}, {"result": 3}, {"error": {}}, {"new": 1}]
)
def test_a_line_of_other_types_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path, claim = tmp_path / "r.jsonl", made.make(made.number, CELLS)
    run(tasks_of([claim]), path, Inline())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], json.dumps({**json.loads(lines[1]), **change}), ""]))
    with pytest.raises(ResultsError, match=r"r\.jsonl:2 is not a row"):
        read(path)


def test_a_last_line_that_was_cut_within_a_character_and_odd_characters_are_read(tmp_path: Path) -> None:
    path, claim = tmp_path / "r.jsonl", made.make(made.number, CELLS)
    row = dataclasses.replace(run(tasks_of([claim]), path, Inline())[0], seed=9, error="a\u2028b \udc80 ü")
    with appending(path) as append:
        append(row)
    with path.open("ab") as file:
        file.write("ü".encode()[:1])
    assert read(path)[-1].error == row.error


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("normkit.lab.run.os.write", full)
    with pytest.raises(ResultsError, match=r"cannot write .*r\.jsonl: No space left"):
        run(tasks_of([made.make(made.number, CELLS)]), tmp_path / "r.jsonl", Inline())


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with appending(path), pytest.raises(ResultsError, match="being written by another run"), appending(path):
        pass


def test_a_killed_run_continues(tmp_path: Path) -> None:
    """SIGKILL in the middle: what was measured is there, the next run adds the rest, nothing twice."""
    path = tmp_path / "r.jsonl"
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from normkit.lab.executors import Processes\n"
        "from normkit.lab.run import run, tasks_of\n"
        "from tests.lab import claims_for_tests as made\n"
        "if __name__ == '__main__':\n"
        "    claim = made.make(made.slow, [{'a': a, 'wait': 0.2} for a in range(12)])\n"
        "    run(tasks_of([claim]), Path(sys.argv[1]), Processes(2))\n"
    )
    command = [sys.executable, str(script), str(path)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 200
    while not path.exists() or path.read_text().count("\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = read(path)
    assert 3 <= len(kept) < 12
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    rows = [Row.from_json(line) for line in path.read_text().splitlines()]
    assert sorted(row.cell["a"] for row in rows) == list(range(12))
    assert rows[: len(kept)] == kept
