"""The same tasks on every executor; a task that raises or kills its worker is a row, and the rest goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normkit.lab.executors import Dask, Executor, ExecutorError, Inline, Processes, Slurm, executor_from
from normkit.lab.run import Task, tasks_of
from tests.lab import claims_for_tests as made

CELLS = [{"a": a} for a in range(4)]


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture(scope="module")
def dask_address() -> Iterator[str]:
    """A cluster of two worker processes."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    import dask
    from distributed import LocalCluster

    settings = {"distributed.scheduler.allowed-failures": 0, "distributed.nanny.environ": {"OMP_NUM_THREADS": "1"}}
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True) as cluster,
    ):
        yield cluster.scheduler_address.removeprefix("tcp://")


def by_cell(executor: Executor, tasks: list[Task]) -> dict[tuple[int, int], Any]:
    rows = list(executor.run(tasks))
    assert len(rows) == len(tasks)
    return {(row.cell["a"], row.seed): row.error or row.result for row in rows}


def test_processes_give_what_this_process_gives() -> None:
    tasks = tasks_of([made.make(made.number, CELLS, seeds=2)])
    assert by_cell(Processes(2), tasks) == by_cell(Inline(), tasks)


def test_a_dead_worker_is_one_failed_row() -> None:
    found = by_cell(Processes(2), tasks_of([made.make(made.sometimes_dies, CELLS)]))
    assert found[1, 0] == "its worker process died (killed, or out of memory)"
    assert [found[a, 0] for a in (0, 2, 3)] == [{"value": a} for a in (0, 2, 3)]


def test_a_raising_measurement_is_one_failed_row() -> None:
    found = by_cell(Processes(2), tasks_of([made.make(made.sometimes_raises, CELLS)]))
    assert found[1, 0] == "RuntimeError: this setting raises"
    assert found[2, 0] == {"value": 2}


def test_a_task_that_cannot_be_sent_is_one_failed_row() -> None:
    tasks = [Task("x", lambda seed, a: {"value": a}, {"a": 0}, 0, True), *tasks_of([made.make(made.number, CELLS[1:])])]
    found = by_cell(Processes(1), tasks)
    assert "ickle" in found[0, 0]
    assert found[1, 0]["threads"] == 1


def test_dask_gives_what_this_process_gives(dask_address: str) -> None:
    tasks = tasks_of([made.make(made.number, CELLS, seeds=2)])
    executor = executor_from(f"dask://{dask_address}", jobs=1, folder=Path())
    assert isinstance(executor, Dask)
    assert by_cell(executor, tasks) == by_cell(Inline(), tasks)


@pytest.mark.timeout(900)  # dead workers start again, and import torch again
def test_dask_outlives_tasks_that_raise_or_kill(dask_address: str) -> None:
    executor = executor_from(f"dask://{dask_address}", jobs=1, folder=Path())
    assert by_cell(executor, tasks_of([made.make(made.sometimes_raises, CELLS)]))[1, 0].startswith("RuntimeError")
    found = by_cell(executor, tasks_of([made.make(made.sometimes_dies, CELLS)]))
    assert "KilledWorker" in found[1, 0]
    assert found[3, 0] == {"value": 3}


@pytest.mark.parametrize("cluster", ["debug", "local"])
def test_submitit_gives_what_this_process_gives(cluster: str, tmp_path: Path) -> None:
    tasks = tasks_of([made.make(made.number, CELLS[:2])])
    executor = executor_from(f"slurm+{cluster}?timeout_min=5", jobs=2, folder=tmp_path)
    assert isinstance(executor, Slurm) and executor.parameters == {"timeout_min": 5}
    assert by_cell(executor, tasks) == by_cell(Inline(), tasks)


@pytest.mark.slow
def test_a_dead_submitit_job_is_one_failed_row(tmp_path: Path) -> None:
    executor = executor_from("slurm+local?timeout_min=5", jobs=2, folder=tmp_path)
    found = by_cell(executor, tasks_of([made.make(made.sometimes_dies, CELLS[:3])]))
    assert found[1, 0].startswith("its job failed") and "\n" not in found[1, 0]
    assert found[2, 0] == {"value": 2}


@pytest.mark.parametrize(
    ("text", "jobs", "message"),
    [
        ("threads", 1, "--executor must be processes"),
        ("dask://", 1, "--executor must be processes"),
        ("slurm+cloud", 1, "--executor must be processes"),
        ("processes", 0, "--jobs must be at least 1; got 0"),
    ],
)
def test_unusable_executors_are_refused(text: str, jobs: int, message: str) -> None:
    with pytest.raises(ExecutorError, match=message):
        executor_from(text, jobs=jobs, folder=Path())


def test_no_scheduler_and_no_slurm_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tasks_of([made.make(made.number, CELLS[:1])])
    monkeypatch.setenv("PATH", str(tmp_path))
    for text, message in (("dask://127.0.0.1:1", "no dask scheduler answers"), ("slurm", "cannot submit to slurm")):
        with pytest.raises(ExecutorError, match=message) as caught:
            list(executor_from(text, jobs=1, folder=tmp_path / "logs").run(tasks))
        assert "\n" not in str(caught.value)
