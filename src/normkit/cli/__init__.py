"""The ``normkit`` command: one file a subcommand."""

from __future__ import annotations

import typer

from normkit.cli import advise, audit, bench, convert, diff, env, explain, lab, rules, swap

app = typer.Typer(
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
    """Entry point of the console script."""
    app()
