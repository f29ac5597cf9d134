"""Timing: check against float64, then interleaved rounds of every provider and of a copy, page faults."""

from __future__ import annotations

import csv
import math
import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit import ops
from normkit.bench.grid import CHANNEL_NORMS, Case, Inputs, make_inputs
from normkit.bench.providers import PROVIDERS, TORCH, Run

ROUNDS = 9
ROUND_SECONDS = 0.004
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}  # of the largest value: a wrong answer, not a rounding


@dataclass
class Result:
    """One provider on one case."""

    case: Case
    provider: str
    microseconds: float
    gigabytes_per_second: float
    copies: float
    """Time over that of ``copy_`` of x into a warm tensor, in the same rounds."""
    page_faults: float
    """Per call."""
    error: float
    """Largest deviation from float64, over the largest value."""

    def row(self) -> dict[str, Any]:
        values = {k: v for k, v in asdict(self).items() if k != "case"}
        return {**asdict(self.case), "shape": "x".join(map(str, self.case.shape)), **values}


def environment() -> dict[str, str]:
    """Versions and hardware, for the head of every output."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    report = ops.report()
    return {
        "processor": model,
        "cores": str(os.cpu_count()),
        "instruction set": str(report.instruction_set),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _training(run: Run) -> Run:
    def step(i: Inputs) -> Any:
        leaves = [t for t in (i.x, i.other, i.weight, i.bias) if t.requires_grad]
        y = run(i)
        y = y[0] if isinstance(y, tuple) else y
        return (y, *(g for g in torch.autograd.grad(y, leaves, i.grad, allow_unused=True) if g is not None))

    return step


def _prepare(case: Case, inputs: Inputs) -> Inputs:
    if case.mode == "train":
        for t in (inputs.x, inputs.other, inputs.weight, inputs.bias):
            t.requires_grad_()
    return inputs


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _error(got: Any, exact: Any) -> float:
    worst = 0.0
    for a, b in zip(_flat(got), _flat(exact), strict=True):
        worst = max(worst, ((a.detach().double() - b).abs().max() / b.abs().max().clamp_min(1e-30)).item())
    return worst


def _time(calls: dict[str, Callable[[], Any]], quantile: float) -> dict[str, tuple[float, float]]:
    """Seconds and page faults per call of each, in interleaved rounds."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, int(ROUND_SECONDS / max(time.perf_counter() - start, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    faults = dict.fromkeys(calls, 0.0)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((time.perf_counter() - start) / repeats[name])
            faults[name] += (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / repeats[name] / ROUNDS
    return {name: (sorted(s)[int(quantile * (len(s) - 1))], faults[name]) for name, s in seconds.items()}


def run_case(case: Case, providers: Iterable[str], quantile: float = 0.5) -> list[Result]:
    """Check and time every provider on one case: the median of the rounds, or a lower quantile on a busy machine."""
    torch.set_num_threads(case.threads)
    inputs = _prepare(case, make_inputs(case))
    wrap = _training if case.mode == "train" else (lambda run: run)
    exact_run = wrap(TORCH[case.norm])
    with torch.set_grad_enabled(case.mode == "train"):
        exact = exact_run(_prepare(case, inputs.to(torch.float64)))
        buffer = torch.empty_like(inputs.x)
        source = inputs.x.detach()
        calls: dict[str, Callable[[], Any]] = {}
        errors: dict[str, float] = {}
        for name in providers:
            run = PROVIDERS[name](case)
            if run is None:
                continue
            step = wrap(run)
            got = step(inputs)
            errors[name] = _error(_flat(got)[: len(_flat(exact))], _flat(exact)[: len(_flat(got))])
            calls[name] = lambda step=step: step(inputs)
        with torch.no_grad():
            calls["copy_"] = lambda: buffer.copy_(source)
        timed = _time(calls, quantile)
    copy = timed["copy_"][0]
    size = inputs.x.numel() * inputs.x.element_size()
    results = []
    for name, (seconds, faults) in timed.items():
        passes = 2 if name == "copy_" else case.passes
        error = errors.get(name, 0.0)
        rate = passes * size / seconds / 1e9
        results.append(Result(case, name, seconds * 1e6, rate, seconds / copy, faults, error))
    limit = TOLERANCE[case.dtype] * (4 if case.mode == "train" else 1)
    for r in results:
        if r.provider == "normkit" and r.error > limit:
            raise AssertionError(f"{case.name}: normkit is off by {r.error:.3g} of the largest value")
    return results


def summarize(results: list[Result]) -> Iterator[str]:
    """Geometric means against the fastest other provider and against torch, and the cells that are behind."""
    cells: dict[Case, dict[str, float]] = {}
    for r in results:
        cells.setdefault(r.case, {})[r.provider] = r.microseconds
    ahead, eager, behind = [], [], []
    for case, times in cells.items():
        others = {p: t for p, t in times.items() if p not in ("normkit", "copy_")}
        if "normkit" not in times or not others:
            continue
        best = min(others, key=lambda p: others[p])
        ratio = others[best] / times["normkit"]
        ahead.append(ratio)
        if "torch" in times:
            eager.append(times["torch"] / times["normkit"])
        if ratio < 0.95:
            behind.append(f"  {case.name}: {times['normkit']:.1f} us, {best} {others[best]:.1f} ({ratio:.2f})")
    if ahead:
        yield f"{len(ahead)} cells; geometric mean {_geomean(ahead):.2f} times the fastest other provider"
        yield f"geometric mean {_geomean(eager):.2f} times torch eager"
        yield f"{len(behind)} cells more than 5 % behind:"
        yield from behind


def _geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def write_csv(path: Path, results: list[Result]) -> None:
    """One row a provider and case, after comment lines with the environment."""
    with path.open("w", newline="") as file:
        for key, value in environment().items():
            file.write(f"# {key}: {value}\n")
        writer = csv.DictWriter(file, fieldnames=list(results[0].row()))
        writer.writeheader()
        writer.writerows(r.row() for r in results)


def table_line(results: list[Result]) -> str:
    """A case's providers on one line: microseconds (times a copy)."""
    parts = [f"{r.provider} {r.microseconds:.1f} ({r.copies:.2f})" for r in results]
    return f"{results[0].case.name:<58} " + "  ".join(parts)


__all__ = ["CHANNEL_NORMS", "Result", "environment", "run_case", "summarize", "table_line", "write_csv"]
