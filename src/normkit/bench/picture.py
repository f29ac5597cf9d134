"""The picture: one row a norm and shape, one panel a dtype and mode, the ratio to the fastest other provider."""

from __future__ import annotations

from pathlib import Path

from normkit.bench.grid import DTYPES, MODES
from normkit.bench.results import Result
from normkit.bench.summary import NOISE, Cell, cells, geometric_mean

COLOURS = {
    "torch": "#e4572e",
    "model code": "#b07aa1",
    "torch.compile": "#f2a541",
    "onnxruntime": "#3c7dc4",
    "openvino": "#2a9d8f",
    "jax": "#6d597a",
}
LEAST, MOST = 0.25, 64.0


def draw(results: list[Result], path: Path) -> None:
    """Write the picture; the file's ending chooses the format.

    Raises:
        ValueError: no case has normkit and another provider.
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    found = cells(results)
    if not found:
        raise ValueError("there is no case in which normkit and another provider were timed")
    rows = list(dict.fromkeys(c.case.problem for c in found))
    dtypes = [d for d in DTYPES if any(c.case.dtype == d for c in found)]
    modes = [m for m in MODES if any(c.case.mode == m for c in found)]
    threads = sorted({c.case.threads for c in found})
    panels = [(m, d) for m in modes for d in dtypes]
    settings = {"font.size": 8, "svg.hashsalt": "normkit", "svg.fonttype": "none", "axes.spines.right": False}
    with plt.rc_context({**settings, "axes.spines.top": False}):
        figure, axes = plt.subplots(
            1,
            len(panels),
            sharey=True,
            squeeze=False,
            figsize=(2.6 + 1.75 * len(panels), 1.6 + 0.2 * len(rows)),
            layout="constrained",
        )
        for axis, (mode, dtype) in zip(axes[0], panels, strict=True):
            part = [c for c in found if c.case.mode == mode and c.case.dtype == dtype]
            _panel(axis, part, rows, threads)
            mean = geometric_mean(c.ratio for c in part)
            axis.set_title(f"{mode}, {dtype}\ngeometric mean {mean:.2f}", fontsize=8)
        axes[0][0].set_yticks(range(len(rows)), [r.replace("_", " ") for r in rows])
        axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
        used = [name for name in COLOURS if any(c.fastest == name for c in found)]
        handles = [Line2D([], [], marker="o", ls="", color=COLOURS[n], label=n) for n in used]
        handles += [
            Line2D([], [], marker=_marker(n, threads), ls="", color="#444444", label=f"{n} thread{'s' * (n > 1)}")
            for n in threads
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), frameon=False,
            title="time of the fastest other provider (its colour) over normkit's; right of the line normkit is faster",
        )  # fmt: skip
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=130, metadata=metadata)
        plt.close(figure)


def _marker(threads: int, among: list[int]) -> str:
    return "ods^v"[min(among.index(threads), 4)]


def _panel(axis: object, part: list[Cell], rows: list[str], threads: list[int]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    axis.set_xscale("log", base=2)
    axis.set_xlim(LEAST / 1.2, MOST * 1.2)
    ticks = [0.25, 1, 4, 16, 64]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.grid(axis="x", color="#eeeeee", lw=0.6)
    axis.set_axisbelow(True)
    axis.axvspan(1 - NOISE, 1 + NOISE, color="#dddddd", lw=0)
    axis.axvline(1, color="#888888", lw=0.8)
    norms = [r.split()[0] for r in rows]
    for k in range(1, len(rows)):
        if norms[k] != norms[k - 1]:
            axis.axhline(k - 0.5, color="#bbbbbb", lw=0.6)
    for c in part:
        shift = 0.16 * (threads.index(c.case.threads) - (len(threads) - 1) / 2)
        axis.plot(
            min(max(c.ratio, LEAST), MOST),
            rows.index(c.case.problem) + 2 * shift,
            marker=_marker(c.case.threads, threads),
            ms=4,
            mew=0.5,
            mec="black" if c.behind else "white",
            color=COLOURS[c.fastest],
        )
