"""Test errors of BatchNorm and GroupNorm by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.cnn import digits_error
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import Interval, difference, settings, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLAIMED = 16
RISE = 1.0


def cells(quick: bool) -> list[Cell]:
    """Norms by batch size; the rate is proportional to it."""
    sizes, epochs, samples = ((32, 8), 1, 128) if quick else ((32, 8, 4, 2), 3, 900)
    return [{"norm": n, "batch": b, "epochs": epochs, "samples": samples} for n in ("batch", "group") for b in sizes]


def measure(seed: int, norm: Any, batch: int, epochs: int, samples: int) -> dict[str, Any]:
    """The test error in per cent, on digits with noise."""
    with seeded(seed):
        return {"error": digits_error(norm, batch=batch, epochs=epochs, samples=samples)}


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    sizes = settings(rows, "batch")
    largest = max(sizes)

    def rise(norm: str, size: int) -> Interval:
        return difference(values(rows, "error", norm=norm, batch=size), values(rows, "error", norm=norm, batch=largest))

    small = sorted((s for s in sizes if s < CLAIMED), reverse=True)
    batch, group = {s: rise("batch", s) for s in small}, {s: rise("group", s) for s in small}
    hurt = {s: batch[s].low > RISE for s in small}
    group_even = all(group[s].low <= RISE for s in small)
    outcome = graded(hurt.values()) if group_even else graded([False, any(hurt.values())])
    shown = "; ".join(f"at {s}: BatchNorm {batch[s]}, GroupNorm {group[s]}" for s in small)
    first = next((s for s in small if hurt[s]), None)
    where = "at no size below 16" if first is None else f"from {first} down"
    return Verdict(
        outcome,
        f"BatchNorm's error is clearly above its error at {largest} {where} (rises in points, {shown})",
        numbers(**{f"batch_{s}": batch[s] for s in small}, **{f"group_{s}": group[s] for s in small}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Error against batch size."""
    lines(axes, rows, "batch", "error", "norm", log="x")


CLAIM = Claim(
    id="batchnorm-batch-size",
    kind="measured",
    statement="BatchNorm needs a batch of at least 16; GroupNorm does not care.",
    source="a tutorial's statement; Wu and He 2018, arXiv:1803.08494",
    criterion="at every batch size below 16, BatchNorm's test error is more than 1 point above its own at the largest "
    "size (lower end of the 95 % t-interval over seeds), and GroupNorm's at none; within limits if BatchNorm's is at "
    "some sizes only, or GroupNorm's rises as well",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
