"""The audit as tables in a terminal: repeated layers in one row, unless all are asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normkit.audit.numbers.record import Numbers
from normkit.audit.report import describe
from normkit.audit.report.grouping import group
from normkit.audit.result import SEVERITIES, Audit, BranchRecord, Finding, NormRecord, collapse

_STYLES = {"info": "cyan", "warning": "yellow", "error": "bold red"}


def show(audit: Audit, console: Console, *, title: str, every: bool = False) -> None:
    """Print norms, branches and findings."""
    console.print(_headline(audit, title))
    console.print(_norm_table(audit.norms, every))
    if audit.branches:
        console.print(_branch_line(audit.branches))
    if audit.numbers is not None:
        console.print(_number_line(audit.numbers))
    for text in _notes(audit, every):
        console.print(Text(f"note: {text}", style="dim"))
    _print_findings(audit.findings, console, every)


def _notes(audit: Audit, every: bool) -> Iterator[str]:
    """What raised, and that values were guessed: how many, or each of them."""
    listed = (*audit.failures, *(audit.guesses if every else ()))
    for text, times in Counter(listed).items():
        yield text + (f" ({times} times)" if times > 1 else "")
    count = len(audit.guesses)
    if count and not every:
        values = "1 value was" if count == 1 else f"{count} values were"
        yield f"{values} guessed, because meta tensors have none (--all lists them)"


def _headline(audit: Audit, title: str) -> Text:
    size = audit.parameters
    unit, name = next(((u, n) for u, n in ((10**9, "B"), (10**6, "M"), (10**3, "k")) if size >= u), (1, ""))
    text = Text(f"{title}", style="bold")
    text.append(
        f": {audit.model}, {size / unit:.3g}{name} parameters on {audit.device}, {len(audit.norms)} norms",
        style="not bold",
    )
    return text


def _norm_table(norms: Sequence[NormRecord], every: bool) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("norm", overflow="fold")
    for column in ("#", "computes", "over", "eps", "gain", "precision", "place"):
        table.add_column(column, justify="right" if column == "#" else "left")
    for members in [[n] for n in norms] if every else group(norms):
        first = members[0]
        calls = sum(n.calls for n in members)
        count = str(len(members)) if calls == len(members) else f"{len(members)} (x{calls // len(members)})"
        table.add_row(
            first.name if len(members) == 1 else collapse(first.name),
            count,
            describe.what(first) + _inline(first),
            describe.axes(first),
            describe.eps(first.spec),
            describe.gain(first.spec),
            describe.precision(first.spec) + describe.mismatch(first),
            first.placement,
        )
    return table


def _inline(norm: NormRecord) -> str:
    where = describe.location(norm)
    return f" (inline{', ' + where if where else ''})" if norm.functional else ""


def _branch_line(branches: Sequence[BranchRecord]) -> Text:
    """The residual branches of each stream as runs of one placement."""
    text = Text("residual branches: ", style="bold")
    streams: dict[int, list[str]] = {}
    for branch in branches:
        streams.setdefault(branch.stream, []).append(branch.placement)
    parts: list[str] = []
    for placements in streams.values():
        runs: list[list[str]] = []
        for placement in placements:
            if runs and runs[-1][0] == placement:
                runs[-1].append(placement)
            else:
                runs.append([placement])
        parts.append(", ".join(f"{len(run)} {run[0]}" for run in runs))
    text.append("; ".join(parts), style="not bold")
    return text


def _number_line(numbers: Numbers) -> Text:
    """The ends of what was measured; all of it is in the files."""
    parts: list[str] = []
    branches = [b for b in numbers.branches if math.isfinite(b.share)]
    if branches:
        sizes = [b.stream_rms for b in branches]
        least = min(branches, key=lambda b: b.share)
        parts.append(f"stream RMS {min(sizes):.3g} to {max(sizes):.3g}")
        parts.append(f"least branch share {least.share:.2g} ({least.name})")
    norms = [n for n in numbers.norms if math.isfinite(n.outlier_ratio)]
    if norms:
        widest = max(norms, key=lambda n: n.outlier_ratio)
        parts.append(f"largest channel {widest.outlier_ratio:.3g} times the median one ({widest.name})")
    if numbers.attentions:
        largest = max(numbers.attentions, key=lambda a: a.logit_max)
        parts.append(f"largest attention logit {largest.logit_max:.3g} ({largest.name})")
    text = Text(f"measured over {numbers.batches} batch{'' if numbers.batches == 1 else 'es'}: ", style="bold")
    text.append("; ".join(parts) or "nothing", style="not bold")
    return text


def _print_findings(findings: Sequence[Finding], console: Console, every: bool) -> None:
    if not findings:
        console.print(Text("findings: none", style="bold green"))
        return
    counts = [f"{n} {s}" for s in reversed(SEVERITIES) if (n := sum(f.severity == s for f in findings))]
    console.print(Text(f"findings: {', '.join(counts)}", style="bold"))
    for finding in findings:
        shown = finding.where if every or len(finding.where) <= 2 else finding.where[:1]
        where = ", ".join(shown) + ("" if len(shown) == len(finding.where) else f" and {len(finding.where) - 1} more")
        line = Text(f"  {finding.severity} {finding.rule}: ", style=_STYLES[finding.severity])
        line.append(f"{where}: {finding.message}.", style="default")
        line.append(f" Fix: {finding.fix}.", style="dim")
        console.print(line)
