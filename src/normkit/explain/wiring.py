"""Pictures and equations of residual placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normkit.explain.draw import CHOSEN, INK, OUTSIDE, new_figure
from normkit.placement import SCHEDULES, Placement, Schedule, Sublayer, schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUBLAYERS: tuple[Sublayer, ...] = ("attention", "ffn")
MOST_LAYERS = 10_000
"""Every layer is looked at."""


@dataclass(frozen=True)
class Branch:
    """A wiring and the sublayers that have it."""

    placement: Placement
    where: str


def branches(name: str, depth: int = 12) -> list[Branch]:
    """The different wirings within a stack of that placement, in the order of depth.

    Raises:
        ValueError: an unknown placement, or more than `MOST_LAYERS`.
    """
    if depth > MOST_LAYERS:
        raise ValueError(f"depth must be at most {MOST_LAYERS}; got {depth}")
    made = schedule(name, depth)
    found: dict[Placement, list[tuple[int, Sublayer]]] = {}
    for layer in range(1, depth + 1):
        for kind in SUBLAYERS:
            found.setdefault(made.branch(layer, kind), []).append((layer, kind))
    if len(found) > 4:  # a factor that changes with every layer: its first and last say it
        first, last = next(iter(found.items())), list(found.items())[-1]
        found = dict([first, last])
    return [Branch(p, _where(seats, depth)) for p, seats in found.items()]


def equation(placement: Placement) -> str:
    """The branch in one line: N a norm, F the sublayer, F' with a norm before its last projection."""
    inside = "N(x)" if placement.input_norm else "x"
    if placement.input_gain != 1:
        inside = f"{placement.input_gain:.4g} {inside}"
    if placement.scalar_bias:
        inside = f"{inside} + b"
    name = "F'" if placement.inner_norm else "F"
    branch = f"{name}({inside})"
    if placement.scalar_bias:
        branch = f"({branch} + c)"
    if placement.output_norm:
        branch = f"N({branch})"
    if placement.branch_scale_kind != "fixed":
        branch = f"λ {branch}"
    elif placement.branch_scale != 1:
        branch = f"{placement.branch_scale:.4g} {branch}"
    alpha = "" if placement.alpha == 1 else f"{placement.alpha:.4f} "
    total = f"{alpha}x + {branch}"
    return f"N({total})" if placement.stream_norm else total


def notes(name: str, depth: int = 12) -> list[str]:
    """What else belongs to a placement: its final norm, its initialization, its source."""
    made, found = schedule(name, depth), branches(name, depth)
    lines = [f"{b.where}: y = {equation(b.placement)}" for b in found]
    first = found[0].placement
    if any(b.placement.inner_norm for b in found):
        lines.append("F' holds a norm before its last projection")
    if any(b.placement.qkv_norm for b in found):
        lines.append("queries, keys and values are normalized within each head")
    if any(b.placement.head_scale for b in found):
        lines.append("each attention head's output has a learned factor")
    if made.parallel:
        lines.append("attention and feed-forward layer read the same normalized stream and are added together")
    if made.second_stream:
        lines.append("a second stream sums the branches unnormalized; both meet at the final norm")
    lines.append(f"final norm: {'after the last block' if made.final_norm else 'none'}")
    if first.branch_scale_kind != "fixed":
        lines.append(f"λ: a learned {first.branch_scale_kind}, {first.branch_scale:g} at first")
    if first.init_roles:
        lines.append(f"initialization: {', '.join(first.init_roles)} times {first.init_gain:.4g} at depth {depth}")
    if first.zero_roles:
        lines.append(f"initialization: {', '.join(first.zero_roles)} start at zero")
    source = SCHEDULES[name].source if name in SCHEDULES else first.source
    return [*lines, f"source: {source}"] if source else lines


def draw_wiring(name: str, depth: int = 12) -> Figure:
    """Draw how a placement is wired: the residual stream upwards, each different branch beside it.

    Raises:
        ValueError: an unknown placement.
        normkit.explain.draw.DrawError: matplotlib is not installed.
    """
    made, found = schedule(name, depth), branches(name, depth)
    figure = new_figure(0.6 + 2.9 * len(found), 4.4)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, branch in zip(axes, found, strict=True):
        _draw_branch(axis, branch, made)
    figure.suptitle(_heading(name, made), fontsize=11, color=INK)
    return figure


def _heading(name: str, made: Schedule) -> str:
    end = "a final norm after the last block" if made.final_norm else "no final norm"
    return f"{name}: {end}"


def _where(seats: list[tuple[int, Sublayer]], depth: int) -> str:
    layers = sorted({layer for layer, _ in seats})
    kinds = [k for k in SUBLAYERS if any(kind == k for _, kind in seats)]
    everywhere = layers == list(range(1, depth + 1))
    span = (
        "every layer"
        if everywhere
        else f"layer {layers[0]}"
        if len(layers) == 1
        else f"layers {layers[0]}-{layers[-1]}"
    )
    return span if len(kinds) == len(SUBLAYERS) else f"{kinds[0]}, {span}"


STREAM, SIDE = 0.26, 0.72


def _draw_branch(axis: Axes, branch: Branch, made: Schedule) -> None:
    p = branch.placement
    rows = _branch_boxes(p, made)
    take, add = 0.6, 1.6 + 0.85 * len(rows)
    top = add + (1.5 if p.stream_norm else 0.9)
    axis.set_xlim(0, 1)
    axis.set_ylim(-0.5, top + 0.5)
    axis.set_axis_off()
    axis.set_title(f"{branch.where}\ny = {equation(p)}", fontsize=8.5, color=INK)
    _arrow(axis, (STREAM, -0.3), (STREAM, add - 0.22))
    _line(axis, (STREAM, take), (SIDE, take))
    _line(axis, (SIDE, take), (SIDE, add))
    _arrow(axis, (SIDE, add), (STREAM + 0.055, add))
    for i, (text, is_norm) in enumerate(rows):
        _box(axis, SIDE, take + 0.75 + 0.85 * i, text, is_norm)
    if made.parallel:
        axis.text(SIDE, take - 0.15, "two branches from here", fontsize=7, color=INK, ha="center", va="top")
    if p.alpha != 1:
        _box(axis, STREAM, (take + add) / 2, f"× {p.alpha:.3g}", False)
    axis.text(STREAM, add, "+", fontsize=13, color=INK, ha="center", va="center",
              bbox={"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": INK})  # fmt: skip
    _arrow(axis, (STREAM, add + 0.24), (STREAM, top + 0.4))
    if p.stream_norm:
        _box(axis, STREAM, add + 0.85, "norm", True)
    if p.second_stream:
        _arrow(axis, (0.06, -0.3), (0.06, top + 0.4))
        _line(axis, (STREAM - 0.055, add), (0.06, add))
        axis.text(0.06, top + 0.42, "2nd stream", fontsize=7, color=INK, ha="center")
    axis.text(STREAM + 0.03, -0.4, "x", fontsize=9, color=INK)
    axis.text(STREAM + 0.03, top + 0.15, "y", fontsize=9, color=INK)


def _branch_boxes(p: Placement, made: Schedule) -> list[tuple[str, bool]]:
    """From the stream back to it: each box's text, and whether it is a norm."""
    rows: list[tuple[str, bool]] = []
    if p.input_norm:
        rows.append(("norm", True))
    if p.input_gain != 1:
        rows.append((f"× {p.input_gain:.3g}", False))
    if p.scalar_bias:
        rows.append(("+ b", False))
    if p.qkv_norm:
        rows.append(("norm of q, k, v", True))
    rows.append(("attention + ffn" if made.parallel else "F", False))
    if p.inner_norm:
        rows[-1] = ("F, first part", False)
        rows += [("norm", True), ("last projection", False)]
    if p.head_scale:
        rows.append(("× head scale", False))
    if p.output_norm:
        rows.append(("norm", True))
    if p.branch_scale_kind != "fixed":
        rows.append(("× λ", False))
    elif p.branch_scale != 1:
        rows.append((f"× {p.branch_scale:.3g}", False))
    if p.scalar_bias:
        rows.append(("+ b", False))
    return rows


def _box(axis: Axes, x: float, y: float, text: str, is_norm: bool) -> None:
    axis.text(x, y, text, fontsize=8.5, ha="center", va="center", color="white" if is_norm else INK,
              bbox={"boxstyle": "round,pad=0.35", "facecolor": CHOSEN if is_norm else "white",
                    "edgecolor": CHOSEN if is_norm else OUTSIDE})  # fmt: skip


def _line(axis: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.plot([start[0], end[0]], [start[1], end[1]], color=INK, linewidth=1.1, zorder=0)


def _arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.1}, zorder=0)
