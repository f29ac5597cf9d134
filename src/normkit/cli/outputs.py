"""What ``normkit audit`` writes: the tables, and the files that were asked for."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from normkit.cli.common import is_stdout, put, tables

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

    def shared(self) -> str | None:
        """What two of the options would write over each other, if there is such a place."""
        given = [(name, str(path)) for name, path in vars(self).items() if isinstance(path, Path)]
        for number, (name, path) in enumerate(given):
            for other, same in given[:number]:
                if path == same:
                    where = "standard output" if path == "-" else path
                    return f"--{other} and --{name} both write to {where}: give one of them another file"
        return None


def write(audit: Audit, title: str, wanted: Wanted) -> None:
    """Print the tables, unless standard output is asked for by a file, and write the files.

    Raises:
        OSError: a file cannot be written.
    """
    if not is_stdout(wanted.json) and not is_stdout(wanted.sarif):
        _show(audit, title, every=wanted.all)
    if wanted.json is not None:
        put("audit", audit.to_json(), wanted.json)
    if wanted.sarif is not None:
        from normkit.audit.report.sarif import sarif

        put("audit", json_text.dumps(sarif(audit, title=title), indent=2), wanted.sarif)
    if wanted.html is not None:
        from normkit.audit.report.html import write as write_html

        given = [name for name in wanted.data if name != "inputs"]
        write_html(audit, wanted.html, title=title, inputs=", ".join(given) or "the audit's own inputs")
    if wanted.github:
        from normkit.audit.report.sarif import github

        for line in github(audit, title=title):
            typer.echo(line)


def _show(audit: Audit, title: str, *, every: bool) -> None:
    from normkit.audit.report.terminal import show

    show(audit, tables(), title=title, every=every)


def print_schema(wanted: bool) -> None:
    """The published JSON schema, and nothing else."""
    if wanted:
        from importlib.resources import files

        typer.echo(files("normkit.audit.report").joinpath("audit.schema.json").read_text(encoding="utf-8"), nl=False)
        raise typer.Exit
