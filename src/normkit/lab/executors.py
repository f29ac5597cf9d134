"""Executors: where tasks run. Processes here, a dask cluster or Slurm; the tasks are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from normkit.lab.claim import Row
from normkit.lab.run import Task, perform


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
