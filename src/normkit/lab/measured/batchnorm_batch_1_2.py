"""Test errors of BatchNorm and GroupNorm at batches of one and two."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.cnn import digits_error
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 1.5


def cells(quick: bool) -> list[Cell]:
    """Norms by batch size."""
    epochs, samples = (1, 32) if quick else (2, 600)
    return [{"norm": n, "batch": b, "epochs": epochs, "samples": samples} for n in ("batch", "group") for b in (1, 2)]


def measure(seed: int, norm: Any, batch: int, epochs: int, samples: int) -> dict[str, Any]:
    """The test error in per cent, on digits with noise."""
    with seeded(seed):
        return {"error": digits_error(norm, batch=batch, epochs=epochs, samples=samples)}


def log_ratio(rows: list[Row]) -> float:
    """The logarithm of BatchNorm's error over GroupNorm's, of one seed's rows; half a test image where one has none."""
    error = {r.cell["norm"]: max(r.result["error"], 100 / 900) for r in rows}
    return math.log(error["batch"] / error["group"])


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    ratios = {b: over_seeds(select(rows, batch=b), log_ratio) for b in settings(rows, "batch")}
    worse, far = [i.low > 0 for i in ratios.values()], [i.low > math.log(FAR) for i in ratios.values()]
    outcome = "holds" if all(far) else graded([any(worse), False])
    shown = "; ".join(
        f"{math.exp(i.mean):.3g} [{math.exp(i.low):.3g}, {math.exp(i.high):.3g}] at {b}" for b, i in ratios.items()
    )
    return Verdict(
        outcome,
        f"BatchNorm's test error over GroupNorm's, by batch size: {shown}",
        numbers(**{f"log_ratio_{b}": i for b, i in ratios.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Errors at both sizes."""
    lines(axes, rows, "batch", "error", "norm")


CLAIM = Claim(
    id="batchnorm-batch-1-2",
    kind="measured",
    statement="At a batch of 1 or 2 GroupNorm is far better than BatchNorm.",
    source="a tutorial's statement; Wu and He 2018, arXiv:1803.08494",
    criterion="BatchNorm's test error is more than 1.5 times GroupNorm's at both sizes (lower end of the 95 % "
    "t-interval of the logarithm over seeds); within limits if it is clearly above it at one size at least",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
