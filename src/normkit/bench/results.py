"""What was measured: rows, and the CSV file that keeps them as they come."""

from __future__ import annotations

import csv
import io
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.bench.grid import Case

COPY = "copy_"
"""The provider that only copies x into a warm tensor; its row is the last of a case."""


class ResultsError(ValueError):
    """A results file cannot be used; the message is for the user."""


@dataclass
class Result:
    """One provider on one case."""

    case: Case
    provider: str
    microseconds: float = math.nan
    spread: float = math.nan
    """Between the quarters of the rounds, over their median."""
    gigabytes_per_second: float = math.nan
    copies: float = math.nan
    """Time over that of ``copy_`` of x into a warm tensor, in the same rounds."""
    page_faults: float = math.nan
    """Per call."""
    error: float = math.nan
    """Largest deviation from float64, over the largest value."""
    note: str = ""
    """Why it was not timed: ``wrong``, or ``failed:`` and the reason."""

    def row(self) -> dict[str, Any]:
        """As a flat row."""
        c = self.case
        return {
            "norm": c.norm,
            "shape": "x".join(map(str, c.shape)),
            "layout": "channels_last" if c.channels_last else "contiguous",
            "dtype": c.dtype,
            "mode": c.mode,
            "threads": c.threads,
            "provider": self.provider,
            **{name: _number(getattr(self, name)) for name in NUMBERS},
            "note": self.note,
        }

    @classmethod
    def of(cls, row: dict[str, Any]) -> Result:
        """From a flat row.

        Raises:
            ResultsError: a column is missing or no number.
        """
        try:
            shape = parse_shape(row["shape"])
            last = {"channels_last": True, "contiguous": False}[row["layout"]]
            case = Case(row["norm"], shape, row["dtype"], row["mode"], int(row["threads"]), last)
            numbers = {name: math.nan if row[name] in ("", None) else float(row[name]) for name in NUMBERS}
            return cls(case, row["provider"], **numbers, note=row["note"] or "")
        except (KeyError, TypeError, ValueError) as wrong:
            raise ResultsError(f"not a row of a benchmark: {wrong}") from None


NUMBERS = ("microseconds", "spread", "gigabytes_per_second", "copies", "page_faults", "error")
COLUMNS = ("norm", "shape", "layout", "dtype", "mode", "threads", "provider", *NUMBERS, "note")


def _number(value: float) -> float | str:
    return "" if math.isnan(value) else float(f"{value:.5g}")


def parse_shape(text: str) -> tuple[int, ...]:
    """``512x1024`` as a shape.

    Raises:
        ValueError: it is none.
    """
    shape = tuple(int(n) for n in text.split("x"))
    if len(shape) not in (2, 4) or min(shape) < 1:
        raise ValueError(f"{text!r} is not ROWSxFEATURES or NxCxHxW")
    return shape


def environment(providers: Iterable[str] = ()) -> dict[str, str]:
    """Hardware, system, and the providers' versions, for the head of every output."""
    import torch

    from normkit import ops
    from normkit.bench.providers import PROVIDERS

    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    facts = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "instruction set": str(ops.report().instruction_set),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "huge pages": huge.read_text().split("[")[1].split("]")[0] if huge.exists() else "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    versions = {name: PROVIDERS[name].version for name in providers if PROVIDERS[name].packages[0] != "torch"}
    return facts | versions


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor()


def start(path: Path, about: dict[str, str]) -> None:
    """A new file: the environment as comments, and the names of the columns."""
    head = "".join(f"# {key}: {value}\n" for key, value in about.items())
    path.write_text(head + ",".join(COLUMNS) + "\n", encoding="utf-8")


def append(path: Path, results: list[Result]) -> None:
    """Add a case's rows, in one write."""
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, lineterminator="\n").writerows(r.row() for r in results)
    with path.open("a", encoding="utf-8") as file:
        file.write(text.getvalue())


def read(path: Path) -> tuple[dict[str, str], list[Result]]:
    """The environment and the rows of all cases that are complete.

    Raises:
        ResultsError: the file cannot be read, or is none of these.
    """
    about, results, _ = _read(path)
    return about, results


def resume(path: Path, about: dict[str, str]) -> list[Result]:
    """The rows of a file that is to be continued; what a killed run left half-written is cut off.

    Raises:
        ResultsError: the file cannot be used, or was made with other versions or on other hardware.
    """
    before, results, end = _read(path)
    differs = [key for key in before.keys() | about.keys() if before.get(key) != about.get(key)]
    if differs:
        was = ", ".join(f"{key} {before.get(key)} (now {about.get(key)})" for key in sorted(differs))
        raise ResultsError(f"{path} was measured with {was}; start a new file")
    with path.open("r+b") as file:
        file.truncate(end)
    return results


def _read(path: Path) -> tuple[dict[str, str], list[Result], int]:
    """Also where the last complete case ends."""
    try:
        lines = path.read_bytes().decode("utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    about: dict[str, str] = {}
    done: list[Result] = []
    pending: list[Result] = []
    seen = end = 0
    header = False
    for number, line in enumerate(lines, 1):
        seen += len(line.encode("utf-8"))
        if line.startswith("# "):
            key, _, value = line[2:].strip().partition(": ")
            about[key] = value
        elif not header:
            if line.strip() != ",".join(COLUMNS):
                raise ResultsError(f"{path}:{number} does not name the columns of a benchmark")
            header, end = True, seen
        elif line.endswith("\n"):
            try:
                pending.append(Result.of(dict(zip(COLUMNS, next(csv.reader([line])), strict=True))))
            except (ValueError, csv.Error) as wrong:
                raise ResultsError(f"{path}:{number} is {wrong}") from None
            if pending[-1].provider == COPY:
                done, pending, end = done + pending, [], seen
    if not header:
        raise ResultsError(f"{path} is no results file of a benchmark")
    return about, done, end
