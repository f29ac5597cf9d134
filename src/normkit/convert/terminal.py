"""A receipt on the terminal: repeated layers in one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normkit.audit.report.terminal import collapse
from normkit.convert.receipt import Change, Difference, Receipt, worst


def show(receipt: Receipt, console: Console | None = None) -> None:
    """Print changes and refusals, grouped over layers that differ in a number only, then the whole model."""
    console = console or Console()
    changed, refused = len(receipt.changed), len(receipt.refused)
    headline = Text(f"{receipt.conversion}: ", style="bold")
    headline.append(f"{printable(receipt.model)}, {changed} changed, {refused} left as they are", style="not bold")
    console.print(headline)
    if receipt.changed:
        console.print(_changes(receipt.changed))
    for label, names in _grouped((f"{collapse(name)}: {reason}", name) for name, reason in receipt.refused).items():
        count = f" ({len(names)} of them)" if len(names) > 1 else ""
        console.print(Text(f"left: {printable(label)}{count}", style="yellow"))
    show_fused(receipt, console)
    for line in _whole(receipt):
        console.print(Text(line))
    for note in receipt.notes:
        console.print(Text(f"note: {printable(note)}", style="dim"))


def show_fused(receipt: Receipt, console: Console) -> None:
    """The blocks of a swap whose residual sums are fused, and why others are not."""
    fused, unfused = getattr(receipt, "fused", ()), getattr(receipt, "unfused", ())
    if fused:
        console.print(_changes(fused))
    for label, names in _grouped((f"{collapse(name)}: {reason}", name) for name, reason in unfused).items():
        count = f" ({len(names)} of them)" if len(names) > 1 else ""
        console.print(Text(f"not fused: {printable(label)}{count}", style="yellow"))


def printable(text: str) -> str:
    """Text in which what would move the cursor, or recolour the terminal, stands escaped: names come from files."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _changes(changes: Sequence[Change]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("name", overflow="fold")
    table.add_column("#", justify="right")
    table.add_column("what", overflow="fold")
    groups = list(_grouped(((collapse(c.name), c.what), c) for c in changes).values())
    measured = {heading: [cell(members) for members in groups] for heading, cell in _MEASURED.items()}
    measured = {heading: cells for heading, cells in measured.items() if set(cells) != {"-"}}
    for heading in measured:
        table.add_column(heading)
    for row, members in enumerate(groups):
        first = members[0]
        name = first.name if len(members) == 1 else collapse(first.name)
        cells = (Text(printable(name)), str(len(members)), Text(printable(first.what)))
        table.add_row(*cells, *(column[row] for column in measured.values()))
    return table


def _worst(members: Sequence[Change]) -> Difference:
    return worst([c.errors.original for c in members if c.errors is not None])


_MEASURED: dict[str, Callable[[Sequence[Change]], str]] = {
    "outputs off by": lambda members: number(_worst(members).outputs),
    "gradients": lambda members: number(_worst(members).gradients),
    "speed": lambda members: _ratios([c.speed.ratio for c in members if c.speed is not None]),
    "with backward": lambda members: _ratios([c.backward_speed.ratio for c in members if c.backward_speed is not None]),
}
"""Columns of what may be measured for each change; one that is empty throughout is not shown."""


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _whole(receipt: Receipt) -> Iterable[str]:
    errors = receipt.errors
    if errors is not None:
        yield f"whole model against the original: {_both(errors.original)}"
        if errors.exact != Difference():
            yield f"against float64: {_both(errors.exact)}; the original: {_both(errors.noise)}"
    for label, speed in (("forward", receipt.speed), ("forward and backward", receipt.backward_speed)):
        if speed is not None:
            before, after = _time(speed.before), _time(speed.after)
            yield f"whole model, {label}: {before} before, {after} after ({speed.ratio:.2f}x)"


def _both(found: Difference) -> str:
    return f"outputs off by {number(found.outputs)}, gradients by {number(found.gradients)}"


def number(value: float | None) -> str:
    """A relative error in two digits; 0 is equal bits."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _ratios(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low}x" if low == high else f"{low} to {high}x"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"
