"""``normkit rules``: what the audit looks for, and each rule explained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from normkit.cli.common import refuse, tables

if TYPE_CHECKING:
    from rich.console import Console

    from normkit.audit.rules.registry import Rule


def command(
    rule: Annotated[
        str | None, typer.Argument(help="The id of a rule, to have it explained.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The rules as JSON on standard output.")] = False,
) -> None:
    """List the rules of the audit, or explain one: what, why, a minimal example, how to fix it, source.

    Example: normkit rules
    Example: normkit rules eps-vanishes
    """
    import json as encoder

    from normkit.audit.rules import RULES, chosen

    console = tables()
    if rule is not None:
        try:
            found = chosen([rule])
        except ValueError as error:
            raise refuse("rules", str(error).removeprefix("select has ")) from None
    else:
        found = list(RULES.values())
    if json:
        rows = [{"id": r.id, "severity": r.severity, "topic": r.topic, "summary": r.summary} for r in found]
        typer.echo(encoder.dumps(rows, indent=2))
    elif rule in RULES:
        from rich.markdown import Markdown

        console.print(Markdown(RULES[rule].page()))
    else:
        _list(console, found)


def _list(console: Console, rules: list[Rule]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("topic", "rule", "severity", "fires where"):
        table.add_column(column, no_wrap=column != "fires where")
    styles = {"info": "cyan", "warning": "yellow", "error": "bold red"}
    topic = ""
    for r in sorted(rules, key=lambda r: r.topic):
        table.add_row("" if r.topic == topic else r.topic, r.id, f"[{styles[r.severity]}]{r.severity}[/]", r.summary)
        topic = r.topic
    console.print(table)
