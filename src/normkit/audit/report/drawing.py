"""The residual streams as SVG: a line, branches that leave it and come back, every norm at its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from normkit.audit.report import describe
from normkit.audit.report.grouping import Run
from normkit.audit.report.plan import Step, Stream
from normkit.audit.result import NormRecord, collapse

WIDTH = 760
_LINE = 92  # x of the stream
_FIRST = 150  # x of the first element of a branch
_NORM, _BOX, _GAP = 106, 152, 16
_PILL = 26
_BRANCH_ROW, _NORM_ROW, _END_ROW = 84, 52, 34
_SLOT_WORDS = {"input": "pre", "inside": "", "inner": "before last map", "output": "output"}


@dataclass
class _Canvas:
    parts: list[Markup] = field(default_factory=list)
    frames: list[Markup] = field(default_factory=list)
    """What lies behind the stream."""
    y: float = 0.0

    def draw(self, svg: str, /, **values: object) -> None:
        """Add SVG; values are escaped, and numbers rounded."""
        shown = {k: f"{v:.1f}".removesuffix(".0") if isinstance(v, float) else v for k, v in values.items()}
        self.parts.append(Markup(svg).format(**shown))


def draw(stream: Stream, label: str, worst: Mapping[str, str]) -> Markup:
    """One stream as an SVG image.

    Args:
        stream: what happens on it.
        label: its name.
        worst: norm or branch name to the highest severity of a finding on it.
    """
    canvas = _Canvas(y=8.0)
    _end(canvas, "in")
    top = canvas.y - 18
    for run in stream.runs:
        _run(canvas, run, worst)
    bottom = canvas.y + 12
    canvas.y += 14
    _end(canvas, "out")
    canvas.y -= 12
    line = Markup('<line class="stream" x1="{x}" y1="{a:.0f}" x2="{x}" y2="{b:.0f}"/>').format(x=_LINE, a=top, b=bottom)
    title = Markup("<title>{}</title><desc>{}</desc>").format(label, in_words(stream))
    head = Markup('<svg class="drawing" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">')
    body = Markup("").join([title, *canvas.frames, line, *canvas.parts])
    return head.format(w=WIDTH, h=f"{canvas.y:.0f}", label=label) + body + Markup("</svg>")


def in_words(stream: Stream) -> str:
    """The same for those who cannot see it."""
    parts = []
    for run in stream.runs:
        steps = "; ".join(_step_words(s) for s in run.items)
        parts.append(f"{run.times} times: {steps}" if run.times > 1 else steps)
    return ". ".join(parts) + "."


def _step_words(step: Step) -> str:
    if step.branch is None:
        assert step.norm is not None
        return f"{describe.what(step.norm)} on the stream ({step.norm.placement}, {step.norm.name})"
    norms = ", ".join(f"{describe.what(n)} ({n.placement})" for _, n in step.slots)
    return f"branch {collapse(step.branch.name)} ({step.branch.placement}{'; ' + norms if norms else ''})"


def _end(canvas: _Canvas, text: str) -> None:
    canvas.draw('<text class="muted" x="{x}" y="{y}" text-anchor="middle">{t}</text>', x=_LINE, y=canvas.y + 12, t=text)
    canvas.y += _END_ROW


def _run(canvas: _Canvas, run: Run[Step], worst: Mapping[str, str]) -> None:
    top = canvas.y
    if run.times > 1:
        canvas.y += 14
    for step in run.items:
        if step.branch is None:
            assert step.norm is not None
            _on_stream(canvas, step.norm, worst, one=run.times == 1)
        else:
            _branch(canvas, step, worst, one=run.times == 1)
    if run.times == 1:
        return
    canvas.y += 8
    height = canvas.y - top - 4
    frame = Markup('<rect class="repeat" x="14" y="{y:.0f}" width="{w}" height="{h:.0f}" rx="10"/>')
    canvas.frames.append(frame.format(y=top, w=WIDTH - 28, h=height))
    canvas.draw('<text class="times" x="28" y="{y}">×{n}</text>', y=top + 22, n=run.times)
    canvas.y += 6


def _on_stream(canvas: _Canvas, norm: NormRecord, worst: Mapping[str, str], *, one: bool) -> None:
    _pill(canvas, norm, _LINE - _NORM / 2, canvas.y + 10, worst)
    name = norm.name if one else collapse(norm.name)
    canvas.draw(
        '<text class="name" x="{x}" y="{y}">{place} <tspan class="muted">{name}</tspan></text>',
        x=_LINE + _NORM / 2 + 12, y=canvas.y + 10 + 17, place=norm.placement, name=_short(name, 72),
    )  # fmt: skip
    canvas.y += _NORM_ROW


def _branch(canvas: _Canvas, step: Step, worst: Mapping[str, str], *, one: bool) -> None:
    branch = step.branch
    assert branch is not None
    leave, middle, back = canvas.y + 8, canvas.y + 30, canvas.y + 66
    before = [(s, n) for s, n in step.slots if s == "input"]
    inside = [(s, n) for s, n in step.slots if s in ("inside", "inner")]
    after = [(s, n) for s, n in step.slots if s == "output"]
    x = float(_FIRST)
    places: list[tuple[NormRecord, float]] = []
    for _, norm in before[:1]:
        places.append((norm, x))
        x += _NORM + _GAP
    box = x
    width = max(_BOX, _inside_width(inside))
    x += width + _GAP
    for _, norm in after[:1]:
        places.append((norm, x))
        x += _NORM + _GAP
    canvas.draw(
        '<path class="branch" d="M{l},{a} Q{l},{m} {q},{m} H{e} Q{f},{m} {f},{n} V{p} Q{f},{b} {e},{b} H{r}"/>',
        l=_LINE, a=leave, m=middle, q=_LINE + 22, e=x, f=x + 16, n=middle + 12, p=back - 12, b=back, r=_LINE + 9,
    )  # fmt: skip
    _box(canvas, step, box, middle, width, inside, worst, one)
    for norm, at in places:
        _pill(canvas, norm, at, middle - _PILL / 2, worst)
    _plus(canvas, back)
    _labels(canvas, step, x, back)
    canvas.y += _BRANCH_ROW


def _inside_width(inside: list[tuple[str, NormRecord]]) -> float:
    return 18 + min(len(inside), 3) * 54


def _box(
    canvas: _Canvas,
    step: Step,
    x: float,
    middle: float,
    width: float,
    inside: list[tuple[str, NormRecord]],
    worst: Mapping[str, str],
    one: bool,
) -> None:
    branch = step.branch
    assert branch is not None
    name = branch.name or "branch"
    canvas.draw(
        '<g><title>{full}</title><rect class="box{c}" x="{x}" y="{y}" width="{w}" height="44" rx="5"/>'
        '<text class="boxname" x="{cx}" y="{ty}" text-anchor="middle">{label}</text></g>',
        full=name if one else collapse(name), c=_mark(branch.name, worst), x=x, y=middle - 22, w=width,
        cx=x + width / 2, ty=middle + (-5.0 if inside else 4.0), label=_short(_last(name), 20),
    )  # fmt: skip
    for number, (slot, norm) in enumerate(inside[:3]):
        left = x + width / 2 + (number - min(len(inside), 3) / 2) * 54 + 2
        canvas.draw(
            '<g><title>{full}</title><rect class="norm{c}" x="{x}" y="{y}" width="50" height="16" rx="8"/>'
            '<text class="tiny" x="{cx}" y="{ty}" text-anchor="middle">{t}</text></g>',
            full=_full(norm), c=_mark(norm.name, worst), x=left, y=middle + 2, cx=left + 25, ty=middle + 13.5,
            t="inner" if slot == "inner" else _short(_last(norm.name), 8),
        )  # fmt: skip


def _last(name: str) -> str:
    """The last part of a dotted name, and the one before it where that is a number."""
    last = name.rsplit(".", 1)[-1]
    return ".".join(collapse(name).rsplit(".", 2)[-2:]) if last.isdigit() else last


def _labels(canvas: _Canvas, step: Step, x: float, back: float) -> None:
    branch = step.branch
    assert branch is not None
    facts = [branch.placement]
    if branch.alpha != 1:
        facts.append(f"stream × {branch.alpha:.3g}")
    if isinstance(branch.branch_scale, str):
        facts.append("learned scale" if branch.branch_scale == "scalar" else "layer scale")
    elif branch.branch_scale != 1:
        facts.append(f"branch × {branch.branch_scale:.3g}")
    if branch.input_gain != 1:
        facts.append(f"input × {branch.input_gain:.3g}")
    canvas.draw(
        '<text class="name" x="{x}" y="{y}">{a}<tspan class="muted">{b}</tspan></text>',
        x=x + 28, y=back - 32, a=facts[0], b="".join(f"  {f}" for f in facts[1:]),
    )  # fmt: skip


def _plus(canvas: _Canvas, y: float) -> None:
    canvas.draw(
        '<circle class="plus" cx="{x}" cy="{y}" r="9"/><path class="plus" d="M{a},{y} H{b} M{x},{c} V{d}"/>',
        x=_LINE, y=y, a=_LINE - 4.5, b=_LINE + 4.5, c=y - 4.5, d=y + 4.5,
    )  # fmt: skip


def _pill(canvas: _Canvas, norm: NormRecord, x: float, y: float, worst: Mapping[str, str]) -> None:
    canvas.draw(
        '<g><title>{full}</title><rect class="norm{c}" x="{x}" y="{y}" width="{w}" height="{h}" rx="13"/>'
        '<text class="normname" x="{cx}" y="{ty}" text-anchor="middle">{text}</text></g>',
        full=_full(norm), c=_mark(norm.name, worst), x=x, y=y, w=_NORM, h=_PILL,
        cx=x + _NORM / 2, ty=y + 17.0, text=_short(describe.kind(norm), 14),
    )  # fmt: skip


def _full(norm: NormRecord) -> str:
    facts = [norm.name, describe.what(norm)]
    if norm.spec is not None:
        facts += [f"over {describe.axes(norm)}", f"eps {describe.eps(norm.spec)}", f"gain {describe.gain(norm.spec)}"]
    return ", ".join((*facts, norm.placement))


def _mark(name: str, worst: Mapping[str, str]) -> str:
    found = worst.get(name)
    return f" {found}" if found in ("warning", "error") else ""


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[-length + 1 :]
