"""The ``normkit`` command: one file a subcommand."""

from __future__ import annotations

import typer

from normkit.cli import audit, env, rules

app = typer.Typer(
    name="normkit",
    help="The normalization toolkit for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("audit")(audit.command)
app.command("env")(env.command)
app.command("rules")(rules.command)


def main() -> None:
    """Entry point of the console script."""
    app()
