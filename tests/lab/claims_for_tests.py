"""Claims whose measurements do what tests need; workers import them from here."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from normkit.lab.claim import Claim, Row, Verdict


def number(*, seed: int, a: int) -> dict[str, Any]:
    return {"value": a + seed + torch.rand(()).item(), "infinite": float("inf"), "threads": torch.get_num_threads()}


def slow(*, seed: int, a: int, wait: float) -> dict[str, Any]:
    time.sleep(wait)
    return {"value": a}


def sometimes_raises(*, seed: int, a: int) -> dict[str, Any]:
    if a == 1:
        raise RuntimeError("this setting\nraises")
    return {"value": a}


def sometimes_dies(*, seed: int, a: int) -> dict[str, Any]:
    if a == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": a}


def once(*, seed: int, a: int, marks: str) -> dict[str, Any]:
    """Raises unless a file is there."""
    if a == 1 and not Path(marks).exists():
        raise RuntimeError("not yet")
    return {"value": a}


def judge(rows: list[Row]) -> Verdict:
    largest = max(row.result["value"] for row in rows)
    return Verdict("holds" if largest < 100 else "wrong as stated", f"the largest is {largest:g}", {"largest": largest})


def make(measure: Any, cells: list[dict[str, Any]], *, seeds: int = 1, name: str = "made-up") -> Claim:
    """A claim around one of the measurements above."""
    return Claim(
        id=name,
        kind="exact",
        statement="All values are under 100.",
        source="a test",
        criterion="the largest value is under 100",
        cells=lambda quick: cells,
        measure=measure,
        judge=judge,
        plot=lambda rows, axes: axes.plot([row.result["value"] for row in rows]),
        seeds=seeds,
    )
