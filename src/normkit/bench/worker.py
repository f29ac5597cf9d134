"""A process that runs some cases: ``python -m normkit.bench.worker`` with a job as JSON on its standard input.

`normkit.bench.run` starts it on as many processors as the cases have threads, so that thread pools which take their
size from there (JAX's) have the right one. It answers one line of JSON a case.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from normkit.bench.grid import Case
from normkit.bench.harness import run_case, warm_case


def main() -> None:
    """Read the job, answer, end."""
    job = json.load(sys.stdin)
    # What libraries print goes to the other stream.
    with os.fdopen(os.dup(1), "w") as answers, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        for given in job["cases"]:
            given["shape"] = tuple(given["shape"])
            print(json.dumps(_answer(Case(**given), job)), file=answers, flush=True)


def _answer(case: Case, job: dict[str, Any]) -> Any:
    if job["warm"]:
        warm_case(case, job["providers"])
        return []
    return [r.row() for r in run_case(case, job["providers"], job["quantile"])]


if __name__ == "__main__":
    main()
