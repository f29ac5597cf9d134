"""The audit as one HTML file: no network, no JavaScript, light and dark, printable."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from normkit.audit.numbers.gains import effective_gain, gain_numbers
from normkit.audit.numbers.record import GainNumbers, Numbers
from normkit.audit.report import chart, describe, drawing, plan
from normkit.audit.report.chart import Chart, Series
from normkit.audit.report.grouping import group
from normkit.audit.result import SEVERITIES, Audit, Finding, NormRecord, collapse

_SHOWN = 4
_MOST_ROWS = 4000
"""Rows of the table of every norm; past that it is left to the JSON."""


def page(audit: Audit, *, title: str, inputs: str = "the audit's inputs") -> str:
    """The whole report as HTML text.

    Args:
        audit: what to show; with numbers, or with real weights, charts are drawn.
        title: what the model is called.
        inputs: what the numbers were measured on.

    Raises:
        ModuleNotFoundError: Jinja2 is not installed (``pip install 'normkit[report]'``).
    """
    from jinja2 import Environment, PackageLoader, select_autoescape

    import normkit

    environment = Environment(
        loader=PackageLoader("normkit.audit.report", "."), autoescape=select_autoescape(default=True)
    )
    environment.filters |= {"figure": figure, "breakable": breakable}
    streams, loose = plan.streams(audit)
    worst = _worst(audit.findings)
    names = _stream_names(audit, [s.number for s in streams])
    gains = _gains(audit)
    return environment.get_template("page.html.j2").render(
        audit=audit,
        title=title,
        size=_size(audit.parameters),
        version=normkit.__version__,
        counts=[(s, n) for s in reversed(SEVERITIES) if (n := sum(f.severity == s for f in audit.findings))],
        placements=[(p, n) for p, n in Counter(b.placement for b in audit.branches).most_common()],
        drawings=[(names[s.number], drawing.draw(s, names[s.number], worst)) for s in streams],
        loose=[_row(members, gains) for members in group(loose)],
        charts=[(c, chart.draw(c)) for c in charts(audit, gains)],
        rows=[_row(members, gains) for members in group(audit.norms)],
        every=[_row([n], gains) for n in audit.norms[:_MOST_ROWS]],
        left_out=max(0, len(audit.norms) - _MOST_ROWS),
        notes=Counter((*audit.failures, *audit.guesses)).items(),
        numbers=audit.numbers,
        inputs=inputs,
        collapse=collapse,
    )


def write(audit: Audit, path: str | Path, *, title: str, inputs: str = "the audit's inputs") -> None:
    """Write `page` to a file."""
    Path(path).write_text(page(audit, title=title, inputs=inputs), encoding="utf-8")


def figure(value: float | None) -> str:
    """A measured number in three digits."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"


def breakable(name: str) -> Markup:
    """A dotted name that a narrow column may break between its parts."""
    return Markup("").join(Markup("{}<wbr>").format(part) for part in re.split(r"(?<=[._/#])", name))


def _size(count: int) -> str:
    unit, name = next(((u, n) for u, n in ((10**9, "B"), (10**6, "M"), (10**3, "k")) if count >= u), (1, ""))
    return f"{count / unit:.3g}{name}"


def _worst(findings: Iterable[Finding]) -> dict[str, str]:
    found: dict[str, str] = {}
    for finding in sorted(findings, key=lambda f: SEVERITIES.index(f.severity)):
        found |= dict.fromkeys(finding.where, finding.severity)
    return found


def _stream_names(audit: Audit, numbers: list[int]) -> dict[int, str]:
    """What the branches of a stream have in common in their names; its number where that is not enough."""
    found: dict[int, str] = {}
    for number in numbers:
        paths = [b.name.split(".") for b in audit.branches if b.stream == number]
        shared = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1 or parts[0].isdigit():
                break
            shared.append(parts[0])
        found[number] = ".".join(shared)
    if len(set(found.values())) < len(found) or not all(found.values()):
        found = {n: f"stream {n}" + (f" ({found[n]})" if found[n] else "") for n in numbers}
    if len(numbers) == 1:
        return dict.fromkeys(found, "residual stream")
    return {n: f"residual {t}" if t.startswith("stream ") else f"residual stream {t}" for n, t in found.items()}


def _gains(audit: Audit) -> dict[str, GainNumbers | None]:
    """Measured, or read from the modules where their weights are real."""
    if audit.numbers is not None:
        return {n.name: n.gain for n in audit.numbers.norms}
    return {n.name: gain_numbers(effective_gain(n, n.module)) for n in audit.norms if n.module is not None}


def _row(members: list[NormRecord], gains: dict[str, GainNumbers | None]) -> dict[str, Any]:
    first = members[0]
    found = [g for n in members if (g := gains.get(n.name)) is not None]
    calls = sum(n.calls for n in members)
    return {
        "name": first.name if len(members) == 1 else collapse(first.name),
        "count": f"{len(members)}" + (f" (×{calls // len(members)})" if calls != len(members) else ""),
        "what": describe.what(first) + (" (inline)" if first.functional else ""),
        "axes": describe.axes(first),
        "eps": describe.eps(first.spec),
        "gain": describe.gain(first.spec),
        "precision": describe.precision(first.spec) + describe.mismatch(first),
        "place": first.placement,
        "where": describe.location(first),
        "gain_range": (min(g.min for g in found), max(g.max for g in found)) if found else None,
        "names": [n.name for n in members],
        "record": first,
    }


# ---- charts ----


def charts(audit: Audit, gains: dict[str, GainNumbers | None]) -> list[Chart]:
    """What was measured, by depth."""
    found: list[Chart] = []
    numbers, depths = audit.numbers, _depths(audit)
    depth = "depth in residual branches"
    if numbers is not None and numbers.branches:
        found += _branch_charts(audit, numbers, depth)
    bands = {name: (g.median, (g.min, g.max)) for name, g in gains.items() if g is not None}
    series = _by_name(audit, depths, {name: m for name, (m, _) in bands.items()}, lambda n: bands[n][1])
    if any(len(s.points) > 1 for s in series):
        found.append(Chart("Gains", "median |offset + weight| of each norm, band from least to largest", depth, series))
    if numbers is None:
        return found
    measured = {n.name: n for n in numbers.norms}
    outliers = {n: m.outlier_ratio for n, m in measured.items() if math.isfinite(m.outlier_ratio)}
    found += _chart(
        "Outlier channels", "largest channel RMS over the median's, before each norm", depth,
        _by_name(audit, depths, outliers),
    )  # fmt: skip
    if numbers.attentions:
        parts = [("with QK-norm", True), ("no QK-norm", False)]
        logits = tuple(
            Series(label, tuple((float(i), a.logit_max) for i, a in enumerate(numbers.attentions) if a.qk_norm is has))
            for label, has in parts
        )
        found += _chart(
            "Attention logits", "largest |q · k| times its scale, before mask and soft cap", "attention, in order",
            tuple(s for s in logits if s.points),
        )  # fmt: skip
    gradients = {n: m.gradient_rms for n, m in measured.items() if m.gradient_rms is not None}
    found += _chart(
        "Gradients", f"RMS of the gradient of {_a(numbers.gradient_of)} at each norm's input", depth,
        _by_name(audit, depths, gradients),
    )  # fmt: skip
    return found


def _a(source: str | None) -> str:
    return "the loss" if source == "loss" else f"a {source} of the outputs"


def _chart(title: str, note: str, x_label: str, series: tuple[Series, ...]) -> list[Chart]:
    return [Chart(title, note, x_label, series)] if any(len(s.points) > 1 for s in series) else []


def _branch_charts(audit: Audit, numbers: Numbers, depth: str) -> list[Chart]:
    streams = list(dict.fromkeys(b.stream for b in numbers.branches))
    names = _stream_names(audit, streams)
    rms = tuple(
        Series(
            "stream" if len(streams) == 1 else re.sub(r"^residual (stream (?!\d))?", "", names[s]),
            tuple((float(b.depth), b.stream_rms) for b in numbers.branches if b.stream == s),
        )
        for s in streams
    )
    shares: dict[str, list[tuple[float, float]]] = {}
    for b in numbers.branches:
        shares.setdefault(collapse(b.name), []).append((float(b.depth), b.share))
    share = tuple(Series(label, tuple(shares[name])) for name, label in _most(shares))
    note = "branch RMS / (branch RMS + stream RMS): 0 adds nothing, ½ as much as was there"
    bounded = [replace(c, zero_to_one=True) for c in _chart("Branch share", note, depth, share)]
    return [*_chart("Stream", "RMS of the residual stream where each branch is added", depth, rms), *bounded]


def _depths(audit: Audit) -> dict[str, float]:
    """Norm name to the depth of the branch that holds it; those behind the last branch come after it."""
    found: dict[str, float] = {}
    count: Counter[int] = Counter()
    for branch in audit.branches:
        for names in (*branch.slots.values(), branch.inside):
            for name in names:
                found.setdefault(name, float(count[branch.stream]))
        count[branch.stream] += 1
    for norm in audit.norms:
        if norm.name not in found:
            late = norm.placement in ("final", "head")
            found[norm.name] = float(count[norm.stream or 0]) if late else 0.0
    return found


def _by_name(
    audit: Audit,
    depths: dict[str, float],
    values: dict[str, float],
    band: Callable[[str], tuple[float, float]] | None = None,
) -> tuple[Series, ...]:
    """One line for the norms that share a name but for layer numbers, the most numerous first."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for norm in audit.norms:
        if norm.name in values:
            lines.setdefault(collapse(norm.name), []).append((depths[norm.name], values[norm.name], norm.name))
    series = []
    for key, label in _most(lines):
        members = sorted(lines[key])
        bands = tuple(band(name) for _, _, name in members) if band is not None else ()
        series.append(Series(label, tuple((x, y) for x, y, _ in members), bands))
    return tuple(series)


def _most(lines: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines with most points (at least two), in order of appearance, each with a short name."""
    largest = sorted((k for k in lines if len(lines[k]) > 1), key=lambda k: -len(lines[k]))[:_SHOWN]
    labels = _short_names(k for k in lines if k in largest)
    return [(k, labels[k]) for k in labels]


def _short_names(keys: Iterable[str]) -> dict[str, str]:
    """Short names that tell some apart: the shortest endings, without what all of them end in."""
    keys = list(keys)
    parts = {k: [p for p in k.split(".") if p != "*"] or [k] for k in keys}
    while len(keys) > 1 and len({p[-1] for p in parts.values()}) == 1 and all(len(p) > 1 for p in parts.values()):
        parts = {k: p[:-1] for k, p in parts.items()}
    for length in range(1, 6):
        short = {k: ".".join(parts[k][-length:]) for k in keys}
        if len(set(short.values())) == len(keys):
            return short
    return {k: k for k in keys}
