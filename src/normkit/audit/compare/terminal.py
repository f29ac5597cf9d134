"""A comparison as a table: layers that differ alike in one row."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normkit.audit.compare.result import Diff, Pair
from normkit.audit.report import describe
from normkit.audit.result import collapse


def show(diff: Diff, console: Console, *, every: bool = False) -> None:
    """Print what differs, or every pair, and where the activations part."""
    alike = sum(pair.same() for pair in diff.pairs)
    head = Text(f"{diff.a} against {diff.b}", style="bold")
    head.append(f": {len(diff.pairs)} norms, {alike} the same", style="not bold")
    console.print(head)
    shown = [p for p in diff.pairs if every or not p.same()]
    if shown:
        console.print(_table(shown, every))
    if diff.parting is not None:
        console.print(Text(f"activations: {diff.parting.sentence()}", style="bold red"))
    elif diff.ran:
        text = "activations: the same at every norm, to float32 rounding"
        console.print(Text(text + ("" if diff.output is None else f" (outputs {diff.output:.2g})"), style="green"))
    for note in diff.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _table(pairs: list[Pair], every: bool) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("in A", overflow="fold")
    table.add_column("in B", overflow="fold")
    table.add_column("#", justify="right")
    table.add_column("differs in (A / B)")
    for column in ("gain", "input", "output"):
        table.add_column(column, justify="right")
    groups: dict[Any, list[Pair]] = {}
    for pair in pairs:
        key = pair.name if every else (_name(pair, "a"), _name(pair, "b"), tuple(pair.fields.items()))
        groups.setdefault(key, []).append(pair)
    for members in groups.values():
        first = members[0]
        one = len(members) == 1
        table.add_row(
            _name(first, "a", whole=one),
            _name(first, "b", whole=one),
            str(len(members)),
            _fields(first),
            _largest(_weights(p) for p in members),
            _largest(g.input for p in members for g in p.gaps),
            _largest(g.output for p in members for g in p.gaps),
        )
    return table


def _weights(pair: Pair) -> float | None:
    known = [v for v in (pair.gain, pair.bias) if v is not None]
    return max(known) if known else None


def _name(pair: Pair, side: str, *, whole: bool = False) -> str:
    norm = getattr(pair, side)
    return "-" if norm is None else norm.name if whole else collapse(norm.name)


def _fields(pair: Pair) -> str:
    if pair.a is None or pair.b is None:
        found = pair.a or pair.b
        assert found is not None
        return f"only {'A' if pair.b is None else 'B'} has it: {describe.what(found)}, {found.placement}"
    text = "; ".join(f"{name} {a} / {b}" for name, (a, b) in pair.fields.items() if name != "reason")
    if pair.weights_differ():
        text = "; ".join(filter(None, [text, "weights"]))
    return text or "-"


def _largest(values: Any) -> str:
    known = [v for v in values if v is not None]
    return f"{max(known):.1e}" if known else "-"
