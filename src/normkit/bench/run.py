"""Runs of many cases: one process for each norm and number of threads, on as many processors as that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import IO

from normkit.bench.grid import Case
from normkit.bench.providers import COMPILING
from normkit.bench.results import Result

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normkit" / "bench"
"""Where compiled code is kept between a warming run and a timed one."""


class BenchError(RuntimeError):
    """A run cannot go on; the message is for the user."""


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    cases: Iterable[Case],
    providers: Sequence[str],
    on_case: Callable[[list[Result]], None],
    *,
    quantile: float = 0.5,
) -> None:
    """Check and time the providers, case by case.

    Args:
        cases: what to run.
        providers: names of `normkit.bench.providers.PROVIDERS`.
        on_case: gets each case's rows as soon as they are there.
        quantile: as `normkit.bench.harness.run_case`.

    Raises:
        BenchError: normkit was wrong, or a process died.
    """
    for group in _groups(cases):
        _work(group, providers, on_case, quantile=quantile)


def warm(cases: Iterable[Case], on_case: Callable[[list[Result]], None], *, jobs: int | None = None) -> None:
    """Compile what `run` will need, several processes at once; nothing is timed.

    Args:
        cases: what to compile for.
        on_case: called after each case, with no rows.
        jobs: processes at once; by default the processors.

    Raises:
        BenchError: a process died.
    """
    groups = _groups(cases)
    with ThreadPoolExecutor(jobs or processors()) as pool:
        for done in [pool.submit(_work, group, COMPILING, on_case, warm=True) for group in groups]:
            done.result()


def _groups(cases: Iterable[Case]) -> list[list[Case]]:
    return [list(group) for _, group in groupby(cases, key=lambda c: (c.threads, c.norm))]


def _work(
    cases: list[Case],
    providers: Sequence[str],
    on_case: Callable[[list[Result]], None],
    *,
    quantile: float = 0.5,
    warm: bool = False,
) -> None:
    threads = cases[0].threads
    job = {"cases": [asdict(c) for c in cases], "providers": list(providers), "quantile": quantile, "warm": warm}
    done = 0
    with tempfile.TemporaryFile("w+") as said:
        process = _start(None if warm else threads, _settings(threads), said)
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it died at once; what it said is below
                process.stdin.write(json.dumps(job))
                process.stdin.close()
            for answer in process.stdout:
                on_case([Result.of(row) for row in json.loads(answer)])
                done += 1
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
        if code or done < len(cases):
            said.seek(0)
            last = next((text for text in reversed(said.read().splitlines()) if text.strip()), f"exit code {code}")
            raise BenchError(f"the run ended at {cases[min(done, len(cases) - 1)].name}: {last}")


def _settings(threads: int) -> dict[str, str]:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor")}
    # One compiling process: a pool of them would work in the background while others are timed.
    own = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **cache, **own}


def _start(threads: int | None, settings: dict[str, str], said: IO[str]) -> subprocess.Popen[str]:
    """A worker on its own processors: it inherits those of this thread."""
    command = [sys.executable, "-m", "normkit.bench.worker"]
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if mine is not None and threads is not None:
        os.sched_setaffinity(0, sorted(mine)[-threads:])
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=settings
        )
    finally:
        if mine is not None:
            os.sched_setaffinity(0, mine)
