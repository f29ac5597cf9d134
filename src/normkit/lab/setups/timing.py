"""Times as ratios: rounds of each in turn within one process, in CPU time, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def median_times(calls: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float = 0.005) -> dict[str, float]:
    """The median CPU seconds of each call over rounds; a round times every call, each repeated for about ``seconds``."""
    repeats = {}
    for name, call in calls.items():
        call()  # warm
        started = time.process_time()
        call()
        repeats[name] = max(1, min(1000, round(seconds / max(time.process_time() - started, 1e-7))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for n in range(rounds):
        for name in order if n % 2 == 0 else reversed(order):  # what runs first is not always the same
            call, count = calls[name], repeats[name]
            started = time.process_time()
            for _ in range(count):
                call()
            found[name].append((time.process_time() - started) / count)
    return {name: statistics.median(times) for name, times in found.items()}
