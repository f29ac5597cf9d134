"""Pictures of a normalization: which elements share a statistic, and what becomes of the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normkit.explain.sets import counted, set_ids
from normkit.explain.steps import Explanation
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHOSEN, OUTSIDE, INK = "#1f6fb4", "#9cc3e4", "#30343a"
SHADES = ("#f1f2f4", "#dfe2e6")
MOST_PANELS, MOST_CELLS, MOST_BARS = 4, 24, 64


class DrawError(ValueError):
    """Nothing can be drawn; the message says why."""


def new_figure(width: float, height: float) -> Figure:
    """A matplotlib figure that needs no display and leaves no global state.

    Raises:
        DrawError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DrawError("pictures need matplotlib: pip install 'normkit[lab]'") from None
    return Figure(figsize=(width, height), dpi=144, layout="constrained")


def draw_sets(
    spec: NormSpec, shape: Sequence[int] | None = None, at: tuple[int, ...] | None = None, *, title: str = ""
) -> Figure:
    """Draw which cells of an input share a statistic: one panel a sample, channels down, positions across.

    Args:
        spec: the normalization.
        shape: the input's, 2 to 4 dims: ``[T, C]``, ``[B, T, C]`` or ``[N, C, H, W]`` by ``spec.channel_dim``. By
            default a small one that shows the kind.
        at: the element whose set is filled; by default the first.
        title: above the picture.

    Raises:
        DrawError: matplotlib is not installed, or a shape of other rank.
        ValueError: a shape that does not fit the spec.
    """
    shape = tuple(shape) if shape is not None else default_shape(spec)
    if not 1 <= len(shape) <= 4:
        raise DrawError(f"shape must have 1 to 4 dims to be drawn; got {list(shape)}")
    ids, enters = set_ids(spec, shape), counted(spec, shape)
    at = at if at is not None else (0,) * len(shape)
    chosen = ids == ids[at]
    channel = 1 if spec.channel_dim == 1 else len(shape) - 1
    panels = _panels(shape, channel)
    figure = new_figure(1.2 + 2.6 * min(len(panels), MOST_PANELS), 2.9)
    axes = figure.subplots(1, min(len(panels), MOST_PANELS), squeeze=False)[0]
    from matplotlib.colors import to_rgb

    for axis, (label, index) in zip(axes, panels, strict=False):
        rows = _cells(ids[index], channel, len(shape))
        marked, inside = (_cells(t[index], channel, len(shape)) for t in (chosen, enters))
        picture = [
            [
                to_rgb((CHOSEN if counts else OUTSIDE) if here else SHADES[int(i) % 2])
                for i, here, counts in zip(*lines, strict=True)
            ]
            for lines in zip(rows.tolist(), marked.tolist(), inside.tolist(), strict=True)
        ]
        axis.imshow(picture, aspect="auto", interpolation="nearest")
        _grid(axis, len(picture), len(picture[0]))
        axis.set_title(label, fontsize=9, color=INK)
        axis.set_xlabel("positions" if rows.shape[1] > 1 else "", fontsize=8, color=INK)
    axes[0].set_ylabel("channels" if spec.axes != "features" else "features", fontsize=8, color=INK)
    shared = int((chosen & enters).sum())
    left_out = len(panels) - len(axes)
    more = f"; {left_out} more samples are not drawn" if left_out > 0 else ""
    figure.suptitle(title or _caption(spec), fontsize=10, color=INK)
    figure.supxlabel(
        f"blue: the {shared} elements of one statistic, of {int(ids.max()) + 1} in {list(shape)}"
        + (" (light blue is divided by it and does not enter it)" if spec.partial < 1 else "")
        + more,
        fontsize=8,
        color=INK,
    )
    return figure


def default_shape(spec: NormSpec) -> tuple[int, ...]:
    """A small input that shows the kind."""
    channels = spec.groups * max(2, math.ceil(6 / spec.groups)) if spec.groups <= 12 else 2 * spec.groups
    if isinstance(spec.channel_dim, tuple):
        return (2, 4, 6) if len(spec.channel_dim) < 3 else (2, 4, 3, 3)
    if spec.channel_dim == 1:
        return (3, channels, 3, 3)
    return (3, 5, channels)


def draw_values(explained: Explanation) -> Figure:
    """Draw what becomes of the chosen set: the input, x̂ and the result, element by element."""
    figure = new_figure(7, 2.6)
    stages = [s for s in explained.steps if s.symbol in ("x", "x̂", "y")]
    axes = figure.subplots(1, len(stages), sharex=True)
    for axis, step in zip(axes, stages, strict=True):
        if len(step.values) <= MOST_BARS:
            axis.bar(range(len(step.values)), step.values, color=CHOSEN, width=0.8)
        else:  # a bar thinner than a pixel would not be seen
            axis.vlines(range(len(step.values)), 0, step.values, color=CHOSEN, linewidth=1)
        axis.axhline(0, color=INK, linewidth=0.8)
        axis.set_title(step.symbol if step.symbol == "x" else f"{step.symbol} = {step.formula}", fontsize=9, color=INK)
        axis.tick_params(labelsize=7, colors=INK)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(explained.title, fontsize=10, color=INK)
    return figure


def _caption(spec: NormSpec) -> str:
    from normkit.explain.words import title

    return title(spec)


def _panels(shape: tuple[int, ...], channel: int) -> list[tuple[str, tuple[int | slice, ...]]]:
    """One panel for each sample, where a dim before the channels and positions is left for samples."""
    if len(shape) < 3 or channel == 0:
        return [("", ())]
    return [(f"sample {n}", (n,)) for n in range(shape[0])]


def _cells(values, channel: int, rank: int):
    if rank < 3:  # [T, C], [N, C] or [C]: its channels are the last dim
        return values.reshape(-1, values.shape[-1]).T[:MOST_CELLS, :MOST_CELLS]
    return values.movedim(channel - 1, 0).reshape(values.shape[channel - 1], -1)[:MOST_CELLS, :MOST_CELLS]


def _grid(axis: Axes, rows: int, columns: int) -> None:
    axis.set_xticks([])  # a major tick would take the place of a minor one
    axis.set_yticks([])
    axis.set_xticks([c - 0.5 for c in range(1, columns)], minor=True)
    axis.set_yticks([r - 0.5 for r in range(1, rows)], minor=True)
    axis.grid(which="minor", color="white", linewidth=1)
    axis.tick_params(which="both", length=0, labelleft=False, labelbottom=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
