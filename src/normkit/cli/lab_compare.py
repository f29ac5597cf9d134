"""``normkit lab compare``: a norm or placement of one's own beside the built-in ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from normkit.cli.common import messages, refuse, tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normkit.lab.compare import Outcome
    from normkit.lab.setups.statistics import Interval


def command(
    norm: Annotated[
        list[str] | None,
        typer.Option(
            help="A norm: my_package:MyNorm, path/to/file.py:MyNorm, or a built-in one such as gemma; repeatable.",
            show_default=False,
        ),
    ] = None,
    placement: Annotated[
        list[str] | None,
        typer.Option(
            help="A placement: file.py:name of a normkit.Placement, or a built-in one such as sandwich; repeatable.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Larger models and more settings: tens of minutes.")] = False,
    seeds: Annotated[int, typer.Option(help="Runs of each setting; an interval needs two.", min=1)] = 3,
    jobs: Annotated[
        int | None, typer.Option(help="Measurements at once; by default the cores.", min=1, show_default=False)
    ] = None,
    executor: Annotated[str, typer.Option(help="processes, inline, dask://HOST:PORT or slurm.")] = "processes",
    plot: Annotated[
        Path | None, typer.Option(help="Where to draw: a .svg, .png or .pdf file.", show_default=False)
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write everything as JSON; - for standard output.", show_default=False)
    ] = None,
) -> None:
    """Compare your norm or placement with the built-in ones: learning rate, depth, batch size, speed, quality.

    A norm is a class or function that makes a module from a number of features; it normalizes (batch, tokens,
    features). One that fails has the reason in its row, and the rest goes on. Exit codes: 0 all were measured, 1 some
    failed, 2 unusable arguments.

    Example: normkit lab compare --norm my_norms.py:MyNorm --plot comparison.svg
    Example: normkit lab compare --placement my_wiring.py:damped --json -
    """
    from normkit.lab.compare import FULL, QUICK, compare
    from normkit.lab.executors import ExecutorError, executor_from

    try:
        drawing = _drawing(plot)
        chosen = executor_from(executor, jobs=jobs or os.cpu_count() or 1, folder=Path("slurm-logs"))
        with _Bar() as bar:
            outcomes = compare(
                norm or [],
                placement or [],
                seeds=seeds,
                effort=FULL if full else QUICK,
                executor=chosen,
                on_row=bar.advance,
                on_start=bar.start,
            )
        if drawing is not None:
            drawing(outcomes)
    except (ExecutorError, _Unusable, ImportError) as error:
        _refuse(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    document = json.dumps([o.to_dict() for o in outcomes], indent=2, ensure_ascii=False)
    if as_json is not None and str(as_json) == "-":
        typer.echo(document)
    else:
        _show(outcomes)
        if as_json is not None:
            try:
                as_json.write_text(document + "\n", encoding="utf-8")
            except OSError as error:
                _refuse(f"cannot write {as_json}: {error.strerror}")
    raise typer.Exit(int(any(o.reason for o in outcomes)))


class _Unusable(Exception):
    """An argument that cannot be used; the message is for the user."""


def _drawing(path: Path | None) -> Any:
    """A function that draws into that file, or None; what would fail after minutes of measuring fails here."""
    if path is None:
        return None
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise _Unusable(f"--plot must end in .svg, .png or .pdf; got {path}")
    if not path.absolute().parent.is_dir():
        raise _Unusable(f"--plot: there is no folder {path.parent}")
    try:
        import matplotlib
    except ImportError:
        raise _Unusable("--plot needs matplotlib: pip install 'normkit[lab]'") from None

    def draw(outcomes: Sequence[Outcome]) -> None:
        from normkit.lab.compare import figure

        with matplotlib.rc_context({"svg.hashsalt": "normkit", "svg.fonttype": "none"}):
            try:
                figure(outcomes).savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
            except OSError as error:
                raise _Unusable(f"cannot write {path}: {error.strerror}") from None

    return draw


class _Bar:
    """One bar over all measurements, on standard error."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=messages(), transient=True)
        self.task: Any = None

    def start(self, count: int) -> None:
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.task = self.bars.add_task("measuring", total=count)

    def advance(self, row: object) -> None:
        self.bars.advance(self.task)

    def __enter__(self) -> _Bar:
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()


def _show(outcomes: Sequence[Outcome]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = tables(160)
    table = Table(box=None, pad_edge=False)
    good = next((o for o in outcomes if not o.reason), None)
    deepest = max(good.depths) if good else ""
    smallest = min(good.batches) if good else ""
    heads = (
        "norm, placement",
        "loss",
        "at rate",
        "trains up to",
        f"{deepest} layers",
        f"batch {smallest}",
        "time / LN",
        "with backward",
    )
    for n, head in enumerate(heads):
        table.add_column(head, justify="left" if n == 0 else "right", no_wrap=True)
    for o in outcomes:
        if o.reason:
            table.add_row(o.name, Text("failed", style="red"))
            continue
        highest = "none" if o.highest_rate is None else f"{o.highest_rate:g}"
        table.add_row(
            o.name,
            _said(o.quality),
            f"{o.best_rate:g}",
            highest,
            _said(o.depths[max(o.depths)]),
            _said(o.batches[min(o.batches)]),
            _said(o.forward),
            _said(o.backward),
        )
    console.print(table)
    for o in outcomes:
        if o.reason:
            console.print(Text(f"{o.name}: {o.reason}", style="red"), soft_wrap=True)
    console.print(
        Text(
            "loss: held-out, nats a character, lower is better; ± is half of the 95 % interval over seeds", style="dim"
        )
    )


def _said(value: Interval | None) -> str:
    if value is None:
        return ""
    spread = f" ± {value.half:.2g}" if value.half < float("inf") else ""
    return f"{value.mean:.3f}{spread}"


def _refuse(reason: object) -> NoReturn:
    raise refuse("lab compare", reason)
