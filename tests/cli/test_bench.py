"""``normkit bench``: rows, files, pictures, a killed run that continues, one line for what cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from normkit.bench import run as runs
from normkit.bench.results import read
from normkit.cli import app

# One norm and one number of threads: one process.
SMALL = ("--norms", "group_norm", "--shapes", "2x4x3x3", "--dtypes", "float32", "--threads", "1")
TINY = ("--norms", "rms_norm", "--shapes", "5x24", *SMALL[4:], "--modes", "fresh", "--providers", "normkit,torch")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_gives_rows_a_summary_and_pictures() -> None:
    result = invoke(*SMALL, "--providers", "normkit,torch,model code", "--csv", "r.csv", "--svg", "r.svg")
    assert result.exit_code == 0, result.output
    about, rows = read(Path("r.csv"))
    assert {"processor", "torch", "normkit", "huge pages"} <= set(about)
    assert len({r.case for r in rows}) == 2 * 3
    assert {r.provider for r in rows} == {"normkit", "torch", "copy_"}  # model code calls torch's group norm
    assert "group_norm 2x4x3x3 float32 train 1t" in result.stdout and "cells more than 5 % behind" in result.stdout
    picture = Path("r.svg").read_text()
    assert "group norm 2x4x3x3/last" in picture and "preallocated, float32" in picture
    again = invoke("--from", "r.csv", "--json", "-", "--png", "r.png")
    assert again.exit_code == 0 and len(json.loads(again.stdout)["results"]) == len(rows)
    assert Path("r.png").read_bytes()[:4] == b"\x89PNG"
    moved = invoke("--from", "r.csv", "--against", "r.csv").stdout
    assert "6 cells in both runs: ratios moved by a factor of 1.000" in moved


def test_a_stopped_run_continues_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(*SMALL, "--providers", "normkit,torch", "--csv", "r.csv").exit_code == 0
    whole = Path("r.csv").read_text()
    lines = whole.splitlines(keepends=True)
    Path("r.csv").write_text("".join(lines[:-5]) + lines[-5][:20])
    before = read(Path("r.csv"))[1]
    ran = []
    real = runs.run

    def spy(cases: list, *args: object, **kwargs: object) -> None:
        ran.extend(cases)
        real(cases, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "run", spy)
    refused = invoke(*SMALL, "--providers", "normkit,torch", "--csv", "r.csv")
    assert refused.exit_code == 2 and "--resume continues it" in refused.stderr and not ran
    assert invoke(*SMALL, "--providers", "normkit,torch", "--csv", "r.csv", "--resume").exit_code == 0
    rows = read(Path("r.csv"))[1]
    assert len(rows) == len(whole.splitlines()) - whole.count("# ") - 1
    assert rows[: len(before)] == before or [r.row() for r in rows[: len(before)]] == [r.row() for r in before]
    assert set(ran) == {r.case for r in rows} - {r.case for r in before} and 0 < len(ran) < 6


@pytest.mark.slow
def test_warming_compiles_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CACHE", tmp_path / "cache")
    result = invoke(*TINY, "--warm")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    compiled = list((tmp_path / "cache" / "inductor").rglob("*.so"))
    assert compiled
    assert invoke(*TINY[:-1], "normkit,torch.compile").exit_code == 0
    assert sorted((tmp_path / "cache" / "inductor").rglob("*.so")) == sorted(compiled)  # nothing was compiled again


def test_a_process_that_dies_is_one_line_with_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.sys, "executable", "/bin/false")
    result = invoke(*TINY)
    assert result.exit_code == 1
    assert "the run ended at rms_norm 5x24 float32 fresh 1t" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--norms", "rms"), "--norms has 'rms'; choose among layer_norm"),
        (("--dtypes", "float64"), "--dtypes has 'float64'"),
        (("--modes", "warm"), "--modes has 'warm'"),
        (("--providers", "tensorflow"), "--providers has 'tensorflow'"),
        (("--threads", "two"), "--threads has 'two'"),
        (("--threads", "9999"), "processors"),
        (("--shapes", "12"), "--shapes has '12'"),
        (("--norms", "layer_norm", "--shapes", "1x2x3x4"), "fits none of the norms"),
        (("--resume",), "--resume needs --csv"),
        (("--from", "none.csv"), "cannot read none.csv"),
        ((*TINY, "--csv", "/proc/x/r.csv"), "cannot write /proc/x/r.csv"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_help_has_examples() -> None:
    result = invoke("--help")
    assert result.exit_code == 0 and "Example: normkit bench --warm" in result.stdout
