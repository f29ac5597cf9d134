"""``python -m normkit.bench``: the grid, or a part of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from normkit.bench import grid
from normkit.bench.harness import Result, environment, run_case, summarize, table_line, write_csv
from normkit.bench.providers import PROVIDERS


def main() -> None:
    """Run what the command line selects."""
    parser = argparse.ArgumentParser(description="Time normalization providers against one another and a copy.")
    parser.add_argument("--norms", nargs="+", default=[*grid.ROW_NORMS, *grid.CHANNEL_NORMS])
    parser.add_argument("--dtypes", nargs="+", default=list(grid.DTYPES), choices=list(grid.DTYPES))
    parser.add_argument("--modes", nargs="+", default=list(grid.MODES), choices=grid.MODES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--shapes", nargs="+", help="such as 512x1024")
    parser.add_argument("--providers", nargs="+", default=[p for p in PROVIDERS if p != "torch.compile"])
    parser.add_argument("--quantile", type=float, default=0.5, help="of the rounds; lower on a busy machine")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    shapes = None
    if options.shapes:
        shapes = tuple(tuple(int(n) for n in s.split("x")) for s in options.shapes)
    for key, value in environment().items():
        print(f"{key}: {value}")
    results: list[Result] = []
    wanted = grid.cases(
        tuple(options.norms), tuple(options.dtypes), tuple(options.modes), tuple(options.threads), shapes
    )
    for case in wanted:
        done = run_case(case, options.providers, options.quantile)
        results += done
        print(table_line(done), flush=True)
    print("\n".join(summarize(results)))
    if options.csv and results:
        write_csv(options.csv, results)


if __name__ == "__main__":
    main()
