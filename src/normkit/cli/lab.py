"""``normkit lab``: statements about normalization, measured and judged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from normkit.cli import lab_compare
from normkit.cli.common import Commands, messages, refuse, tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from normkit.lab.claim import Claim, Row
    from normkit.lab.verdicts import Decision

RESULTS = Path("lab-results.jsonl")
COLOURS = {"holds": "green", "holds within limits": "yellow", "wrong as stated": "red", "no verdict": "dim"}

app = Commands(
    help="Statements about normalization: run them, judge them, report them, and compare your own norm.",
    no_args_is_help=True,
)
app.command("compare")(lab_compare.command)

Results = Annotated[Path, typer.Option("--results", help="The results file: JSON lines, one a measurement.")]


@app.command("list")
def list_claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claims to list; all, exact or measured stand for many.")
    ] = None,
    results: Results = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")] = False,
) -> None:
    """List the claims, with the verdicts that the results file gives.

    Without a results file the verdicts are those of the report that comes with normkit.

    Example: normkit lab list
    Example: normkit lab list measured --json
    """
    claims = _select("list", ids or ["all"])
    shipped = results == RESULTS and not results.exists()
    decisions = _committed(claims) if shipped else _decide("list", claims, results)
    if as_json:
        entries = [{**_as_dict(d), "committed": shipped} for d in decisions]
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("claim", "kind", "verdict", "statement"):
        table.add_column(name, no_wrap=name != "statement")
    for d in decisions:
        table.add_row(d.claim.id, d.claim.kind, _coloured(d.state), Text(d.claim.statement))
    console = tables(160)
    console.print(table)
    if shipped:
        console.print("The verdicts are those of the report that comes with normkit; measure: normkit lab run all")


@app.command("run")
def run_claims(
    ids: Annotated[
        list[str], typer.Argument(help="Claims to run; all, exact or measured stand for many.", show_default=False)
    ],
    quick: Annotated[bool, typer.Option("--quick", help="The quick form: seconds a claim.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Seeds for each setting, where chance plays a part.", min=1, show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Measurements at once; by default the cores.", min=1, show_default=False)
    ] = None,
    executor: Annotated[
        str, typer.Option(help="processes, inline, dask://HOST:PORT, or slurm?slurm_partition=P&timeout_min=60.")
    ] = "processes",
    results: Results = RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the results file has.")] = False,
) -> None:
    """Measure claims, keep every measurement, and judge.

    A run that was stopped or killed continues where it was when it is started again. Exit codes: 0 every measurement
    was made, 1 some failed (they are named, and tried again by the next run), 2 unusable arguments or files.

    Example: normkit lab run worked-example pre-row-mean
    Example: normkit lab run all --quick --jobs 4
    """
    from normkit.lab.executors import ExecutorError, executor_from
    from normkit.lab.run import ResultsError, run, tasks_of

    claims = _select("run", ids)
    tasks = tasks_of(claims, quick=quick, seeds=seeds)
    try:
        chosen = executor_from(executor, jobs=jobs or os.cpu_count() or 1, folder=results.parent / "slurm-logs")
        with _Progress(tasks) as progress:
            made = run(tasks, results, chosen, on_row=progress.advance, on_start=progress.start, fresh=fresh)
    except (ExecutorError, ResultsError) as error:
        _refuse("run", error)
    except KeyboardInterrupt:
        messages().print("stopped; the same command continues", highlight=False)
        raise typer.Exit(130) from None
    _show_verdicts(_decide("run", claims, results))
    failed = [row for row in made if row.error is not None]
    for row in failed[:10]:
        _fail_line(row)
    if len(failed) > 10:
        messages().print(f"and {len(failed) - 10} more", style="red")
    raise typer.Exit(1 if failed else 0)


@app.command("report")
def report_claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claims to report; all, exact or measured stand for many.")
    ] = None,
    results: Results = RESULTS,
    out: Annotated[Path, typer.Option("--out", help="The folder for report.html, report.md and figures.")] = Path(
        "lab-report"
    ),
) -> None:
    """Write one HTML page and Markdown with verdicts, numbers and plots, from the results file alone.

    Example: normkit lab report
    Example: normkit lab report exact --out docs/lab
    """
    from normkit.lab.report import ReportError, write

    claims = _select("report", ids or ["all"])
    rows = _read("report", results)
    if not results.exists():
        _refuse("report", f"there is no {results}; `normkit lab run all --quick` makes one")
    try:
        report = write(claims, rows, out)
    except ReportError as error:
        _refuse("report", error)
    typer.echo(", ".join(f"{count} {state}" for state, count in report.counts))
    typer.echo(f"{out / 'report.html'}\n{out / 'report.md'}")


class _Progress:
    """A bar a claim while it has measurements to come, and one for all; silent where there is no terminal."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=messages(),
            transient=True,
        )
        self.by_claim: dict[str, Any] = {}
        self.total: Any = None
        self.tasks = tasks

    def start(self, done: set[str]) -> None:
        """Show what is to do, with what the results file has already."""
        self.total = self.bars.add_task("all", total=len(self.tasks), completed=len(done))
        for claim in dict.fromkeys(task.claim for task in self.tasks):
            own = [task.key for task in self.tasks if task.claim == claim]
            before = sum(key in done for key in own)
            visible = before < len(own)
            self.by_claim[claim] = self.bars.add_task(f"  {claim}", total=len(own), completed=before, visible=visible)

    def advance(self, row: Row) -> None:
        """One more measurement."""
        if row.error is not None:
            _fail_line(row, self.bars.console)
        self.bars.advance(self.total)
        bar = self.by_claim[row.claim]
        self.bars.advance(bar)
        if self.bars.tasks[bar].finished:
            self.bars.update(bar, visible=False)

    def __enter__(self) -> _Progress:
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()


def _fail_line(row: Row, console: Console | None = None) -> None:
    text = f"{row.claim} {json.dumps(row.cell)} seed {row.seed}: {row.error}"
    (console or messages()).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def _show_verdicts(decisions: Sequence[Decision]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("claim", "verdict", "because"):
        table.add_column(name, no_wrap=name != "because")
    for d in decisions:
        because = d.reason if d.verdict is None else d.verdict.because
        table.add_row(d.claim.id, _coloured(d.state), Text(because))
    tables(160).print(table)


def _as_dict(d: Decision) -> dict[str, Any]:
    because = d.reason if d.verdict is None else d.verdict.because
    return {
        "id": d.claim.id,
        "kind": d.claim.kind,
        "statement": d.claim.statement,
        "source": d.claim.source,
        "criterion": d.claim.criterion,
        "verdict": None if d.verdict is None else d.verdict.outcome,
        "because": because,
        "quick": d.quick,
        "seeds": d.seeds,
    }


def _select(command: str, ids: Sequence[str]) -> list[Claim]:
    from normkit.lab.claims import UnknownClaim, select

    try:
        return select(ids)
    except UnknownClaim as error:
        _refuse(command, error)


def _read(command: str, results: Path) -> list[Row]:
    from normkit.lab.run import ResultsError, read

    try:
        return read(results)
    except ResultsError as error:
        _refuse(command, error)


def _decide(command: str, claims: Sequence[Claim], results: Path) -> list[Decision]:
    from normkit.lab.verdicts import decide

    rows = _read(command, results)
    return [decide(claim, rows) for claim in claims]


def _committed(claims: Sequence[Claim]) -> list[Decision]:
    from normkit.lab.verdicts import Decision, committed

    verdicts = committed()
    return [Decision(claim, verdicts.get(claim.id), "not in the report", (), (), False) for claim in claims]


def _coloured(state: str) -> Any:
    from rich.text import Text

    return Text(state, style=COLOURS.get(state, ""))


def _refuse(command: str, reason: object) -> NoReturn:
    raise refuse(f"lab {command}", reason)
