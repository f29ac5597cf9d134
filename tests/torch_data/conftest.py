"""Counts what ran of torch's own test data and prints it, whatever pytest's verbosity."""

from collections import Counter

import pytest

COUNTS: dict[str, Counter] = {}


@pytest.fixture(scope="session")
def counts():
    return COUNTS


def pytest_terminal_summary(terminalreporter):
    if not COUNTS:
        return
    terminalreporter.section("torch's own test data, run against normkit")
    for name, counter in COUNTS.items():
        shown = ", ".join(f"{n} {what}" for what, n in sorted(counter.items()))
        terminalreporter.write_line(f"{name}: {shown}, {counter['skipped']} skipped")
