"""Run: the measurements of claims as tasks, in any order, each kept in a results file as soon as it is done."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.errors import described
from normkit.lab.claim import Cell, Claim, Row, task_key

if TYPE_CHECKING:
    from normkit.lab.executors import Executor


_ALONE = threading.Lock()
"""torch's generator and thread count belong to the process, and a dask worker may have several threads."""


class ResultsError(ValueError):
    """A results file cannot be used; the message is for the user."""


@dataclass(frozen=True)
class Task:
    """One measurement to make. Workers get it pickled: ``measure`` must be a module's function."""

    claim: str
    measure: Callable[..., dict[str, Any]]
    cell: Cell
    seed: int
    quick: bool

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return task_key(self.claim, self.cell, self.seed, self.quick)

    def failed(self, reason: str) -> Row:
        """The row of this task where nothing came back."""
        return self.row({}, 0.0, _now(), reason)

    def row(self, result: dict[str, Any], seconds: float, started: str, error: str | None = None) -> Row:
        """The row of this task."""
        return Row(self.claim, self.seed, self.quick, self.cell, result, seconds, versions(), started, error)


def tasks_of(claims: Iterable[Claim], *, quick: bool = False, seeds: int | None = None) -> list[Task]:
    """Every measurement of these claims: cell by cell, ``seeds`` times each where a claim has randomness."""
    return [
        Task(claim.id, claim.measure, cell, seed, quick)
        for claim in claims
        for cell in claim.cells(quick)
        for seed in range(claim.seeds if seeds is None or claim.seeds == 1 else seeds)
    ]


def perform(task: Task) -> Row:
    """Make one measurement, on one thread and from its seed; what it raises becomes the row's error."""
    import torch

    with _ALONE:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _measured(task)
        finally:
            torch.set_num_threads(threads)


def _measured(task: Task) -> Row:
    import torch

    started, clock = _now(), time.perf_counter()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            result = task.measure(seed=task.seed, **task.cell)
        row = task.row(result, time.perf_counter() - clock, started)
        row.to_json()  # a result that JSON cannot hold is this task's error, not the run's
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: code that is measured must not end the run
        return task.row({}, time.perf_counter() - clock, started, described(error, 2000))
    return row


def run(
    tasks: Iterable[Task],
    path: Path,
    executor: Executor,
    *,
    on_row: Callable[[Row], None] = lambda row: None,
    on_start: Callable[[set[str]], None] = lambda done: None,
    fresh: bool = False,
) -> list[Row]:
    """Make every measurement that the results file has not, and append each as it comes.

    Args:
        tasks: see `tasks_of`.
        path: the results file; it and its folder are made where they are missing.
        executor: where to.
        on_row: called with each new row, after it was appended.
        on_start: called first, with the keys of the tasks that are done already.
        fresh: measure these tasks again, whatever the file has; of two rows with a result the later counts.

    Returns:
        The new rows, failed ones included.

    Raises:
        ResultsError: the file cannot be written or read, or another run is writing it.
    """
    made = []
    wanted = {task.key: task for task in tasks}
    with appending(path) as append:
        done = set() if fresh else {row.key for row in read(path) if row.error is None} & set(wanted)
        on_start(done)
        for row in executor.run([task for key, task in wanted.items() if key not in done]):
            append(row)
            made.append(row)
            on_row(row)
    return made


def read(path: Path) -> list[Row]:
    """The rows of a results file, one for each measurement: the last that has a result, else the last.

    Raises:
        ResultsError: a line that is no row.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
        text = data[: data.rfind(b"\n") + 1].decode()  # what follows was cut off while it was written
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"cannot read {path}: {error}") from error
    rows: dict[str, Row] = {}
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            row = Row.from_json(line)
        except ValueError as error:
            raise ResultsError(f"{path}:{number} is not a row of the lab ({error}); delete the line") from error
        if row.error is None or row.key not in rows or rows[row.key].error is not None:
            rows[row.key] = row
    return list(rows.values())


@contextmanager
def appending(path: Path) -> Generator[Callable[[Row], None]]:
    """A function that appends a row in one write; a half-written last line is cut off first.

    Raises:
        ResultsError: the file cannot be written, or another run holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror}") from error
    try:
        _lock(file, path)
        _cut_half_line(file)

        def append(row: Row) -> None:
            line = (row.to_json() + "\n").encode(errors="backslashreplace")  # JSON's own escape of half a pair
            try:
                written = os.write(file, line)
            except OSError as error:
                raise ResultsError(f"cannot write {path}: {error.strerror}") from error
            if written != len(line):
                raise ResultsError(f"cannot write {path}: the disk is full")

        yield append
    finally:
        os.close(file)


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ResultsError(f"{path} is being written by another run; wait for it or give another --results") from error


def _cut_half_line(file: int) -> None:
    size = os.fstat(file).st_size
    tail = os.pread(file, size, 0)
    os.ftruncate(file, tail.rfind(b"\n") + 1)


def versions() -> dict[str, str]:
    """The software, and the kind of processor; nothing that names the machine."""
    import torch

    import normkit

    return {
        "normkit": normkit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
