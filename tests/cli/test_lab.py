"""``normkit lab`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from normkit.cli import app
from normkit.lab.claims import all_claims
from normkit.lab.verdicts import committed


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["lab", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", ["list", "run", "report", "compare"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: normkit lab {command}" in result.stdout


def test_list_shows_every_claim() -> None:
    result = invoke("list", "--json")
    assert result.exit_code == 0
    listed = json.loads(result.stdout)
    assert [entry["id"] for entry in listed] == list(all_claims())
    assert {(entry["id"], entry["verdict"], entry["committed"]) for entry in listed} == {
        (name, verdict.outcome, True) for name, verdict in committed().items()
    }
    assert "E[x²] − E[x]²" in invoke("list", "variance-forms").stdout  # brackets are text, not markup
    table = invoke("list", "worked-example", "projection").stdout
    assert "worked-example" in table and "projection" in table and "rms-identity" not in table


def test_run_judges_and_continues_and_list_and_report_read_it(tmp_path: Path) -> None:
    first = invoke("run", "worked-example", "sphere-radius", "--executor", "inline")
    assert first.exit_code == 0, first.output
    assert "wrong as stated" in first.stdout and "holds" in first.stdout
    lines = (tmp_path / "lab-results.jsonl").read_text().splitlines()
    again = invoke("run", "worked-example", "sphere-radius", "--executor", "inline")
    assert again.exit_code == 0 and again.stdout == first.stdout
    assert (tmp_path / "lab-results.jsonl").read_text().splitlines() == lines
    verdicts = {e["id"]: e["verdict"] for e in json.loads(invoke("list", "exact", "--json").stdout)}
    assert verdicts["sphere-radius"] == "wrong as stated" and verdicts["projection"] is None
    report = invoke("report", "worked-example", "--out", "out")
    assert report.exit_code == 0 and report.stdout.splitlines()[0] == "1 holds"
    assert (tmp_path / "out" / "report.html").is_file() and (tmp_path / "out" / "report.md").is_file()


def test_a_failed_measurement_gives_exit_code_1_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    import normkit.lab.claims as claims
    from tests.lab import claims_for_tests as made

    bad = made.make(made.sometimes_raises, [{"a": 0}, {"a": 1}], name="bad")
    known = {"bad": bad, "good": dataclasses.replace(bad, id="good", measure=made.number)}
    monkeypatch.setattr(claims, "all_claims", lambda: known)
    result = invoke("run", "all", "--executor", "inline")
    assert result.exit_code == 1
    assert "this setting raises" in result.stderr
    assert "no verdict" in result.stdout and "holds" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "worked-exampel"), "did you mean worked-example"),
        (("list", "zzzz"), "no claim has the id 'zzzz'"),
        (("run", "worked-example", "--executor", "cloud"), "--executor must be processes"),
        (("run", "worked-example", "--executor", "inline", "--results", "/proc/x/r.jsonl"), "cannot write"),
        (("report",), "there is no lab-results.jsonl"),
        (("report", "--results", "broken.jsonl"), "broken.jsonl:1 is not a row of the lab"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    Path("broken.jsonl").write_text("{}\n")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_colour_respects_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[3" in invoke("run", "worked-example", "--executor", "inline").stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in invoke("run", "worked-example", "--executor", "inline").stdout


def test_importing_normkit_does_not_import_the_lab() -> None:
    code = (
        "import sys, normkit; print('normkit.lab' in sys.modules, 'matplotlib' in sys.modules);"
        "normkit.lab.register; print('normkit.lab' in sys.modules, 'matplotlib' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False", "True", "False"]
