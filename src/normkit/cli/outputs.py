"""What ``normkit audit`` writes: the tables, and the files that were asked for."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from normkit.audit import Audit


@dataclass
class Wanted:
    """The outputs that were asked for; ``-`` is standard output."""

    json: Path | None = None
    html: Path | None = None
    sarif: Path | None = None
    github: bool = False
    all: bool = False
    data: list[str] = field(default_factory=list)
    """What was measured on, as the user named it."""


def write(audit: Audit, title: str, wanted: Wanted) -> None:
    """Print the tables, unless standard output is asked for by a file, and write the files.

    Raises:
        OSError: a file cannot be written.
    """
    if "-" not in (str(wanted.json), str(wanted.sarif)):
        _show(audit, title, every=wanted.all)
    if wanted.json is not None:
        _put(audit.to_json(), wanted.json)
    if wanted.sarif is not None:
        from normkit.audit.report.sarif import sarif

        _put(json_text.dumps(sarif(audit, title=title), indent=2), wanted.sarif)
    if wanted.html is not None:
        from normkit.audit.report.html import write as write_html

        given = [name for name in wanted.data if name != "inputs"]
        write_html(audit, wanted.html, title=title, inputs=", ".join(given) or "the audit's own inputs")
    if wanted.github:
        from normkit.audit.report.sarif import github

        for line in github(audit, title=title):
            typer.echo(line)


def _show(audit: Audit, title: str, *, every: bool) -> None:
    from rich.console import Console

    from normkit.audit.report.terminal import show

    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own; names should stay whole
        console = Console(width=140)
    show(audit, console, title=title, every=every)


def _put(text: str, path: Path) -> None:
    if str(path) == "-":
        typer.echo(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def print_schema(wanted: bool) -> None:
    """The published JSON schema, and nothing else."""
    if wanted:
        from importlib.resources import files

        typer.echo(files("normkit.audit.report").joinpath("audit.schema.json").read_text(encoding="utf-8"), nl=False)
        raise typer.Exit
