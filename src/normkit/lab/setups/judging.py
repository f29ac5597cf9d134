"""What the judges of measured claims share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from normkit.lab.claim import Outcome, Row
from normkit.lab.setups.statistics import Interval, difference, mean, settings, values

NOT_SEEN: Outcome = "not reproduced at this scale"
WRONG: Outcome = "wrong as stated"


def graded(checks: Iterable[bool], otherwise: Outcome = NOT_SEEN) -> Outcome:
    """``"holds"`` if every check passed, ``"holds within limits"`` if one did, else ``otherwise``."""
    found = list(checks)
    return "holds" if all(found) else "holds within limits" if any(found) else otherwise


def numbers(**intervals: Interval) -> dict[str, float | str]:
    """Each interval as three numbers: ``name``, ``name_low`` and ``name_high``."""
    found: dict[str, float | str] = {}
    for name, interval in intervals.items():
        found |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return found


def gain(rows: Sequence[Row], name: str, better: dict[str, Any], than: dict[str, Any]) -> Interval:
    """How much lower a number is in the cells ``better`` than in the cells ``than``, paired by seed."""
    return difference(values(rows, name, **than), values(rows, name, **better))


def best(rows: Sequence[Row], name: str, setting: str, **cell: Any) -> Any:
    """The value of a setting (a learning rate) at which a number is lowest in the mean over seeds."""
    return min(settings(rows, setting), key=lambda v: mean(values(rows, name, **{setting: v}, **cell)))


def within(interval: Interval, low: float, high: float) -> bool:
    """Whether the whole interval lies between two bounds."""
    return low <= interval.low and interval.high <= high
