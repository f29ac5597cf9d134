"""Counts what ran of torch's own test data and prints it, whatever pytest's verbosity and number of processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

COUNTS: dict[str, Counter] = {}


@pytest.fixture(scope="session")
def counts() -> dict[str, Counter]:
    return COUNTS


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a worker's counts go to the process that prints
        output["counts"] = {name: dict(counter) for name, counter in COUNTS.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for name, counter in getattr(node, "workeroutput", {}).get("counts", {}).items():
        COUNTS.setdefault(name, Counter()).update(counter)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not COUNTS:
        return
    terminalreporter.section("torch's own test data, run against normkit")
    for name, counter in sorted(COUNTS.items()):
        shown = ", ".join(f"{n} {what}" for what, n in sorted(counter.items()))
        terminalreporter.write_line(f"{name}: {shown}, {counter['skipped']} skipped")
