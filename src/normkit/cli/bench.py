"""``normkit bench``: normkit's norms beside those of other providers, timed."""

from __future__ import annotations

import json as encoder
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normkit.cli.common import is_stdout, messages, put, refuse, tables

if TYPE_CHECKING:
    from normkit.bench.grid import Case
    from normkit.bench.results import Result
    from normkit.bench.summary import Cell

_LIST = "comma-separated"


def command(
    norms: Annotated[str | None, typer.Option(help=f"Norms of the grid, {_LIST}.", show_default=False)] = None,
    shapes: Annotated[
        str | None,
        typer.Option(help=f"ROWSxFEATURES and NxCxHxW, {_LIST}; need not be the grid's.", show_default=False),
    ] = None,
    dtypes: Annotated[str | None, typer.Option(help="float32,bfloat16,float16 or some of them.")] = None,
    modes: Annotated[str | None, typer.Option(help="fresh,preallocated,train or some of them.")] = None,
    threads: Annotated[str | None, typer.Option(help=f"Numbers of threads, {_LIST}; by default 1 and 2.")] = None,
    providers: Annotated[
        str | None, typer.Option(help=f"Providers, {_LIST}; by default all that are installed.", show_default=False)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Keep the rows here as they come; --resume continues it.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the --csv file of a run that ended.")] = False,
    read: Annotated[
        Path | None,
        typer.Option("--from", help="Measure nothing: summarize and draw this --csv file.", show_default=False),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="An earlier --csv file: say how far ratios moved.", show_default=False)
    ] = None,
    warm: Annotated[bool, typer.Option("--warm", help="Measure nothing: compile what a run will need, once.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write everything as JSON; - for standard output.", show_default=False)
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the ratios as SVG.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the ratios as PNG.", show_default=False)] = None,
    quantile: Annotated[
        float, typer.Option(help="Which of the rounds counts: the median; a lower one on a busy machine.", min=0, max=1)
    ] = 0.5,
) -> None:
    """Time normkit beside torch, compiled code, ONNX Runtime, OpenVINO and JAX, interleaved, each answer checked first.

    Exit codes: 0 measured, 1 normkit was wrong or a process died, 2 unusable arguments or files.

    Example: normkit bench --norms rms_norm --shapes 512x1024 --threads 1
    Example: normkit bench --warm && normkit bench --csv results.csv --png ratios.png
    Example: normkit bench --from results.csv --json -
    """
    from normkit.bench import results as files
    from normkit.bench.run import BenchError

    quiet = is_stdout(json)
    try:
        earlier = None if against is None else files.read(against)[1]
        if read is not None:
            about, rows = files.read(read)
        else:
            chosen, names = _cases(norms, shapes, dtypes, modes, threads), _providers(providers)
            if warm:
                _warm(chosen)
                return
            about = files.environment(names)
            rows = _measure(chosen, names, about, csv, resume, quantile, quiet)
    except (files.ResultsError, _Refused) as refused:
        raise refuse("bench", refused) from None
    except BenchError as failed:
        raise refuse("bench", failed, 1) from None
    except KeyboardInterrupt:
        messages().print("stopped" if csv is None else f"stopped; --csv {csv} --resume continues", highlight=False)
        raise typer.Exit(130) from None
    _write(about, rows, json, [path for path in (svg, png) if path is not None])
    if not quiet:
        _show(about, rows, earlier)


class _Refused(Exception):
    """Nothing can be measured; the message is for the user."""


def _choose(option: str, given: str | None, known: list[str]) -> tuple[str, ...]:
    names = tuple(known) if given is None else tuple(name.strip() for name in given.split(","))
    for name in names:
        if name not in known:
            raise _Refused(f"--{option} has {name!r}; choose among {', '.join(known)}")
    return names


def _cases(
    norms: str | None, shapes: str | None, dtypes: str | None, modes: str | None, threads: str | None
) -> list[Case]:
    from normkit.bench import grid
    from normkit.bench.results import parse_shape
    from normkit.bench.run import processors

    try:
        sizes = None if shapes is None else tuple(parse_shape(s.strip()) for s in shapes.split(","))
    except ValueError:
        raise _Refused(f"--shapes has {shapes!r}; give ROWSxFEATURES or NxCxHxW, such as 512x1024,8x64x56x56") from None
    most = processors()
    try:
        counts = tuple(range(1, min(2, most) + 1)) if threads is None else tuple(map(int, threads.split(",")))
    except ValueError:
        raise _Refused(f"--threads has {threads!r}; give numbers such as 1,2") from None
    if not all(1 <= n <= most for n in counts):
        raise _Refused(f"--threads has {threads!r}; there are {most} processors")
    found = list(
        grid.cases(
            _choose("norms", norms, list(grid.NORMS)),
            _choose("dtypes", dtypes, list(grid.DTYPES)),
            _choose("modes", modes, list(grid.MODES)),
            counts,
            sizes,
        )
    )
    if not found:
        raise _Refused(f"--shapes {shapes} fits none of the norms; rows are 512x1024, images 8x64x56x56")
    return found


def _providers(given: str | None) -> tuple[str, ...]:
    from normkit.bench.providers import PROVIDERS

    names = _choose("providers", given, list(PROVIDERS))
    missing = [name for name in names if not PROVIDERS[name].installed]
    if given is not None and missing:
        raise _Refused(f"--providers has {missing[0]}, which is not installed: pip install 'normkit[bench]'")
    return tuple(name for name in names if name not in missing)


def _measure(
    cases: list[Case],
    names: tuple[str, ...],
    about: dict[str, str],
    csv: Path | None,
    resume: bool,
    quantile: float,
    quiet: bool,
) -> list[Result]:
    from normkit.bench import results as files
    from normkit.bench.run import run

    rows: list[Result] = []
    if csv is None and resume:
        raise _Refused("--resume needs --csv: the file to continue")
    if csv is not None:
        if csv.exists() and resume:
            rows = files.resume(csv, about)
        elif csv.exists():
            raise _Refused(f"{csv} exists; --resume continues it, another name starts anew")
        else:
            try:
                files.start(csv, about)
            except OSError as error:
                raise _Refused(f"cannot write {csv}: {error.strerror or error}") from None
    done = {r.case for r in rows}
    left = [c for c in cases if c not in done]
    with _bar(len(cases), len(cases) - len(left)) as bar:

        def keep(new: list[Result]) -> None:
            rows.extend(new)
            if csv is not None:
                files.append(csv, new)
            bar(None if quiet else _line(new))

        run(left, names, keep, quantile=quantile)
    return rows


def _warm(cases: list[Case]) -> None:
    from normkit.bench.run import warm

    with _bar(len(cases), 0) as bar:
        warm(cases, lambda _: bar(None))


class _bar:
    """Progress on standard error; silent where there is no terminal."""

    def __init__(self, total: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Drawing takes time on the processors that are being measured.
        self.progress = Progress(*columns, console=messages(), transient=True, refresh_per_second=1)
        self.task = self.progress.add_task("", total=total, completed=done)

    def __call__(self, text: str | None) -> None:
        if text is not None:
            typer.echo(text)
        self.progress.advance(self.task)

    def __enter__(self) -> Callable[[str | None], None]:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()


def _line(rows: list[Result]) -> str:
    """A case's providers on one line: microseconds (times a copy)."""
    parts = [
        f"{r.provider} {r.note.split(':')[0]}" if r.note else f"{r.provider} {r.microseconds:.1f} ({r.copies:.2f})"
        for r in rows
    ]
    return f"{rows[0].case.name:<58} " + "  ".join(parts)


def _write(about: dict[str, str], rows: list[Result], json: Path | None, pictures: list[Path]) -> None:
    from normkit.bench.picture import draw
    from normkit.bench.summary import to_dict

    if json is not None:
        put("bench", encoder.dumps(to_dict(about, rows), indent=1, allow_nan=False), json)
    for path in pictures:
        try:
            draw(rows, path)
        except ModuleNotFoundError:
            raise refuse("bench", "a picture needs matplotlib: pip install 'normkit[bench]'") from None
        except ValueError as error:
            raise refuse("bench", error) from None
        except OSError as error:
            raise refuse("bench", f"cannot write {path}: {error.strerror or error}") from None


def _show(about: dict[str, str], rows: list[Result], earlier: list[Result] | None) -> None:
    from normkit.bench.summary import cells, left_out, movement

    console = tables()
    found = cells(rows)
    if found:
        console.print(_table(found))
    behind = sorted((c for c in found if c.behind), key=lambda c: c.ratio)
    console.print(f"{len(behind)} of {len(found)} cells more than 5 % behind", highlight=False)
    for c in behind:
        ours, theirs = c.times["normkit"], c.times[c.fastest]
        console.print(f"  {c.case.name}: {ours:.1f} us, {c.fastest} {theirs:.1f} ({c.ratio:.2f})", highlight=False)
    for r in left_out(rows):
        reason = f"off by {r.error:.2g} of the largest value" if r.note == "wrong" else r.note
        console.print(f"left out: {r.provider}, {r.case.name}: {reason}", highlight=False, markup=False)
    if earlier is not None:
        count, middle, high = movement(earlier, rows)
        console.print(
            f"{count} cells in both runs: ratios moved by a factor of {middle:.3f}, 90 % by less than {high:.3f}"
        )
    for key, value in about.items():
        console.print(f"{key}: {value}", style="dim", highlight=False, markup=False)


def _table(found: list[Cell]) -> Any:
    from rich.table import Table

    from normkit.bench.summary import by, line

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("norm", "cells", "/ fastest other", "/ torch", "copies", "behind", "fastest other, times"):
        table.add_column(column, justify="left" if column.startswith(("norm", "fastest")) else "right")
    sets = [*by(found, lambda c: c.norm), *by(found, lambda c: c.mode), *by(found, lambda c: c.dtype)]
    sets += [*by(found, lambda c: f"{c.threads} threads"), line("all", found)]
    for entry in sets:
        fastest = ", ".join(f"{name} {n}" for name, n in entry.fastest.items())
        numbers = (f"{entry.ratio:.2f}", f"{entry.eager:.2f}", f"{entry.copies:.2f}", str(entry.behind))
        table.add_row(entry.name, str(entry.cells), *numbers, fastest)
    return table
