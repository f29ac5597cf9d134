"""Random numbers that depend on a seed alone and leave the caller's own untouched."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(*numbers: int) -> Generator[None]:
    """Run a block under a seed made of ``numbers``; torch's state is as before when it ends."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**31
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
