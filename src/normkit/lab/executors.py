"""Executors: where tasks run. Processes here, a dask cluster or Slurm; the tasks are the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from normkit.errors import described
from normkit.lab.claim import Row
from normkit.lab.run import Task, perform


class ExecutorError(ValueError):
    """Tasks cannot be sent there; the message is for the user."""


class Executor(Protocol):
    """Gives the row of every task, in the order in which they are done."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """Every task once; a task whose worker died gives a row with an error."""
        ...


class Inline:
    """One after the other, in this process."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """See `Executor.run`."""
        yield from map(perform, tasks)


class Processes:
    """``jobs`` processes on this machine."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """See `Executor.run`. A death takes the whole pool along, so what ran then is tried again, each alone."""
        waiting = deque(tasks)
        while waiting:
            for task in (yield from _pool(waiting, min(self.jobs, len(waiting)))):
                if (yield from _pool(deque([task]), 1)):
                    yield task.failed("its worker process died (killed, or out of memory)")


def _pool(waiting: deque[Task], workers: int) -> Generator[Row, None, list[Task]]:
    """Work through ``waiting`` until it is empty or a worker dies; returns the tasks that were running then."""
    running: dict[Future[Row], Task] = {}
    lost: list[Task] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        while (waiting or running) and not lost:
            try:
                while waiting and len(running) < workers:
                    running[pool.submit(perform, waiting[0])] = waiting[0]
                    waiting.popleft()
            except BrokenProcessPool:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                try:
                    row = future.result()
                except BrokenProcessPool:
                    lost.append(task)
                    continue
                except Exception as error:  # the task could not be sent, or its row not come back
                    row = task.failed(described(error))
                yield row
    return lost + list(running.values())


def _end_with_parent() -> None:
    """In a worker: die quietly on Ctrl-C, and when the parent is killed (its queue would keep the worker waiting)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Dask:
    """The workers of a dask cluster, which must be able to import normkit."""

    def __init__(self, address: str) -> None:
        self.address = address

    def run(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """See `Executor.run`. dask blames all that ran on a worker for its death: each is tried again alone."""
        try:
            from distributed import Client, KilledWorker, as_completed
        except ImportError as error:
            raise ExecutorError("dask:// needs dask.distributed: pip install 'normkit[dask]'") from error
        try:
            client = Client(self.address, timeout=10)
        except (OSError, ValueError) as error:
            raise ExecutorError(f"no dask scheduler answers at {self.address}: {described(error)}") from error
        with client:
            futures = {client.submit(perform, task, pure=False): task for task in tasks}
            suspects = []
            for future in as_completed(list(futures)):
                task = futures[future]
                try:
                    row = future.result()
                except KilledWorker:
                    suspects.append(task)
                    continue
                except Exception as error:
                    row = task.failed(f"it was lost ({described(error)})")
                yield row
            for task in suspects:
                try:
                    yield client.submit(perform, task, pure=False).result()
                except Exception as error:
                    yield task.failed(f"its worker died ({described(error)})")


class Slurm:
    """A Slurm array with one job a task, through submitit; ``cluster`` may be ``"local"`` or ``"debug"`` too."""

    def __init__(self, folder: Path, jobs: int, *, cluster: str = "slurm", **parameters: Any) -> None:
        self.folder = folder
        self.jobs = jobs
        self.cluster = cluster
        self.parameters = parameters

    def run(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """See `Executor.run`."""
        if not tasks:
            return
        try:
            import submitit
        except ImportError as error:
            raise ExecutorError("slurm needs submitit: pip install 'normkit[slurm]'") from error
        try:
            executor = submitit.AutoExecutor(folder=self.folder, cluster=self.cluster)
            executor.update_parameters(
                name="normkit-lab", cpus_per_task=1, slurm_array_parallelism=self.jobs, **self.parameters
            )
            with executor.batch():
                pending = {executor.submit(perform, task): task for task in tasks}
        except Exception as error:  # no Slurm here, or it refuses a parameter
            raise ExecutorError(f"cannot submit to {self.cluster}: {described(error)}") from error
        while pending:
            done = [job for job in pending if job.done()]
            for job in done:
                task = pending.pop(job)
                try:
                    row = job.result()
                except Exception as error:
                    row = task.failed(f"its job failed ({described(error)}); logs are in {self.folder}")
                yield row
            if not done:
                time.sleep(0.5 if self.cluster != "slurm" else 5)


def executor_from(text: str, *, jobs: int, folder: Path) -> Executor:
    """The executor that an argument names.

    Args:
        text: ``processes``, ``inline``, ``dask://HOST:PORT``, or ``slurm``, with options as a query:
            ``slurm?slurm_partition=cpu&timeout_min=60``; ``slurm+local`` runs submitit's jobs on this machine.
        jobs: how many tasks run at once (dask decides for itself).
        folder: where submitit keeps its files.

    Raises:
        ExecutorError: a name that means nothing, or jobs < 1.
    """
    if jobs < 1:
        raise ExecutorError(f"--jobs must be at least 1; got {jobs}")
    url = urlsplit(text)
    if text == "processes":
        return Processes(jobs)
    if text == "inline":
        return Inline()
    if url.scheme == "dask" and url.netloc:
        return Dask(f"tcp://{url.netloc}")
    name, _, cluster = url.path.partition("+")
    if name == "slurm" and cluster in ("", "local", "debug"):
        options = {key: int(value) if value.isdigit() else value for key, value in parse_qsl(url.query)}
        return Slurm(folder, jobs, cluster=cluster or "slurm", **options)
    raise ExecutorError(f"--executor must be processes, inline, dask://HOST:PORT or slurm; got {text!r}")
