"""One case: every provider checked against float64, then timed in interleaved rounds beside a copy."""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.bench.grid import Case, Inputs, make_inputs
from normkit.bench.providers import PROVIDERS, Step
from normkit.bench.providers.eager import TORCH
from normkit.bench.providers.step import torch_step
from normkit.bench.results import COPY, Result

ROUND_SECONDS = 0.004
"""What a round of one provider takes at least: calls are repeated within it."""
CASE_SECONDS = 0.4
"""What all rounds of a case should take: slow cases get fewer rounds."""
ROUNDS = (5, 11)
SLOW = 4.0
"""A provider this many times slower than the fastest takes part in every third round only."""
SETTLE_SECONDS = 0.005
"""Between providers that have thread pools: OpenMP's threads wait busily for so long before they go to sleep."""
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}
"""Largest deviation over largest value: beyond is a wrong answer, no rounding. Some ten units in the last place for
forms that round every intermediate result; gradients, which are sums of such, get four times that."""


class Timing(NamedTuple):
    """Of one provider on one case."""

    seconds: float
    spread: float
    page_faults: float


def error(got: Tensor, exact: Tensor) -> float:
    """The largest deviation, over the largest value; piece by piece, so that large tensors stay in the cache."""
    if got.shape != exact.shape:
        raise ValueError(f"a result has shape {tuple(got.shape)}; it should be {tuple(exact.shape)}")
    if exact.dim() == 4 and exact.is_contiguous(memory_format=torch.channels_last):
        got, exact = got.permute(0, 2, 3, 1), exact.permute(0, 2, 3, 1)
    pieces = zip(got.detach().reshape(-1).split(1 << 18), exact.reshape(-1).split(1 << 18), strict=True)
    worst = torch.stack([torch.stack([(a.double() - b).abs().max(), b.abs().max()]) for a, b in pieces]).amax(0)
    return (worst[0] / worst[1].clamp_min(1e-30)).item()


@lru_cache(maxsize=1)
def _problem(case: Case) -> tuple[Inputs, tuple[Tensor, ...]]:
    """Inputs, and the outputs that float64 gives."""
    inputs = make_inputs(case)
    exact = inputs.to(torch.float64)
    for name in case.leaves if case.mode == "train" else ():
        getattr(inputs, name).requires_grad_()
        getattr(exact, name).requires_grad_()
    step = torch_step(case, exact, TORCH[case.norm])
    return inputs, tuple(t.detach() for t in step.outputs(step.call()))


def _checked(case: Case, inputs: Inputs, exact: tuple[Tensor, ...], name: str) -> tuple[Step | None, float]:
    step = PROVIDERS[name].make(case, inputs)
    if step is None:
        return None, 0.0
    got = step.outputs(step.call())
    return step, max(error(a, b) for a, b in zip(got, exact, strict=True))


def run_case(case: Case, providers: Iterable[str], quantile: float = 0.5) -> list[Result]:
    """Check and time every provider on one case; the copy comes last.

    One that raises, or is wrong, has a row that says so and is not timed. normkit itself may be neither.

    Args:
        case: what to run, in this process and on the processors that it may use.
        providers: names of `PROVIDERS`.
        quantile: which of the rounds counts: the median, or a lower one on a busy machine.

    Raises:
        AssertionError: normkit's answer is wrong.
    """
    torch.set_num_threads(case.threads)
    results: dict[str, Result] = {}
    calls: dict[str, Callable[[], Any]] = {}
    with torch.set_grad_enabled(case.mode == "train"):
        # Both forward modes share a problem.
        inputs, exact = _problem(replace(case, threads=1, mode="train" if case.mode == "train" else "fresh"))
        limit = TOLERANCE[case.dtype] * (4 if case.mode == "train" else 1)
        for name in providers:
            try:
                step, off = _checked(case, inputs, exact, name)
            except Exception as failure:
                if name == "normkit":
                    raise
                reason = next(iter(str(failure).strip().splitlines()), "")
                results[name] = Result(case, name, note=f"failed: {type(failure).__name__}: {reason}"[:200])
                continue
            if step is None:
                continue
            right = off <= limit  # a NaN is not
            results[name] = Result(case, name, error=off, note="" if right else "wrong")
            if right:
                calls[name] = step.call
            elif name == "normkit":
                raise AssertionError(f"{case.name}: normkit is off by {off:.3g} of the largest value; at most {limit}")
        source = inputs.x.detach()
        buffer = torch.empty_like(source)
        calls[COPY] = torch.no_grad()(lambda: buffer.copy_(source))
        results[COPY] = Result(case, COPY)
        timings = measure(calls, quantile, SETTLE_SECONDS if case.threads > 1 else 0.0)
    size = source.numel() * source.element_size()
    for name, timing in timings.items():
        r = results[name]
        r.microseconds, r.spread, r.page_faults = timing.seconds * 1e6, timing.spread, timing.page_faults
        r.gigabytes_per_second = (2 if name == COPY else case.passes) * size / timing.seconds / 1e9
        r.copies = timing.seconds / timings[COPY].seconds
    return list(results.values())


def warm_case(case: Case, providers: Iterable[str]) -> None:
    """Compile what `run_case` will find on disk then; nothing is checked or timed."""
    torch.set_num_threads(case.threads)
    inputs = make_inputs(case)
    with torch.set_grad_enabled(case.mode == "train"):
        for name in case.leaves if case.mode == "train" else ():
            getattr(inputs, name).requires_grad_()
        for name in providers:
            step = PROVIDERS[name].make(case, inputs)
            if step is not None:
                step.call()


def measure(
    calls: dict[str, Callable[[], Any]], quantile: float = 0.5, settle: float = SETTLE_SECONDS
) -> dict[str, Timing]:
    """Time all calls in interleaved rounds, with a pause of ``settle`` seconds before each."""
    once = {name: _once(call) for name, call in calls.items()}
    repeats = {name: max(1, int(ROUND_SECONDS / seconds)) for name, seconds in once.items()}
    fastest = min((s for name, s in once.items() if name != COPY), default=0.0)
    slow = {name for name, s in once.items() if name != COPY and s > SLOW * fastest}
    round_seconds = sum(once[n] * repeats[n] / (3 if n in slow else 1) + settle for n in calls)
    rounds = min(max(int(CASE_SECONDS / round_seconds), ROUNDS[0]), ROUNDS[1])
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    faults: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            names = list(calls)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:  # each after another one in turn
                if name in slow and turn % 3:
                    continue
                taken, fault = _round(calls[name], repeats[name], once[name], settle)
                seconds[name].append(taken)
                faults[name].append(fault)
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(_quantile(s, quantile), _spread(s), sum(faults[name]) / len(s)) for name, s in seconds.items()}


def _once(call: Callable[[], Any]) -> float:
    """Seconds of a call, roughly."""
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        if best > 0.05:
            break
    return max(best, 1e-7)


def _round(call: Callable[[], Any], repeats: int, once: float, settle: float) -> tuple[float, float]:
    time.sleep(settle)
    if once < ROUND_SECONDS:
        call()  # its threads wake, and its tensors come into the cache
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = (time.perf_counter() - start) / repeats
    return taken, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / repeats


def _quantile(values: list[float], quantile: float) -> float:
    return sorted(values)[int(quantile * (len(values) - 1))]


def _spread(values: list[float]) -> float:
    return (_quantile(values, 0.75) - _quantile(values, 0.25)) / _quantile(values, 0.5)
