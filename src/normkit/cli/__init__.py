"""The ``normkit`` command: one file a subcommand."""

from __future__ import annotations

import io
import sys

from normkit.cli import advise, audit, bench, convert, diff, env, explain, lab, rules, swap
from normkit.cli.common import Commands

app = Commands(
    name="normkit",
    help="The normalization toolkit for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("advise")(advise.command)
app.command("audit")(audit.command)
app.command("bench")(bench.command)
app.add_typer(convert.app, name="convert")
app.command("diff")(diff.command)
app.command("env")(env.command)
app.command("explain", context_settings=explain.CONTEXT)(explain.command)
app.add_typer(lab.app, name="lab")
app.command("rules")(rules.command)
app.command("swap")(swap.command)


def main() -> None:
    """Entry point of the console script. What a terminal's encoding cannot say stands escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
