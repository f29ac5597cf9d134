"""Old against new in interleaved rounds: what else the machine does then hits both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from normkit.convert.receipt import Speed

_ROUND = 0.002
_MOST = 50


def interleave(
    calls: Sequence[Callable[[], Any]], rounds: int, device: torch.device | None = None
) -> list[list[float]]:
    """Seconds of one call of each, round by round; short calls are repeated within a round."""
    wait = _waiting(device)
    repeats = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        wait()
        repeats.append(max(1, min(_MOST, int(_ROUND / max(time.perf_counter() - start, 1e-7)))))
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
        for i in order:
            start = time.perf_counter()
            for _ in range(repeats[i]):
                calls[i]()
            wait()
            seconds[i].append((time.perf_counter() - start) / repeats[i])
    return seconds


def speed(seconds: Sequence[Sequence[float]]) -> Speed:
    """Medians of (before, after)."""
    return Speed(before=statistics.median(seconds[0]), after=statistics.median(seconds[1]))


def is_slower(seconds: Sequence[Sequence[float]]) -> bool:
    """Whether the second is slower than the first beyond noise: by 5 % at the median, and in three rounds of four."""
    before, after = seconds
    lost = sum(b > a for a, b in zip(before, after, strict=True))
    return statistics.median(after) > 1.05 * statistics.median(before) and 4 * lost >= 3 * len(before)


def _waiting(device: torch.device | None) -> Callable[[], None]:
    if device is None or device.type == "cpu":
        return lambda: None
    accelerator = getattr(torch, device.type, None)
    return getattr(accelerator, "synchronize", lambda: None)
