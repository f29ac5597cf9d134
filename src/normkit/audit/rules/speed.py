"""Speed: norms that run far from memory speed on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from normkit.audit.result import Finding, NormRecord, names
from normkit.audit.rules.registry import Evidence, MakeFinding, rule

FAR = 3.0
"""A norm reads and writes what a copy does; one that takes so many copies leaves time on the table."""
_GAIN = 1.3
_REPEATS, _AT_LEAST = 7, 2e-3


@rule(
    "slow-norm",
    "info",
    "a norm takes several times as long as a copy of its input, and a faster one exists",
    opt_in=True,
)
def slow_norm(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Measured here and now, in copies of the same tensor; each kind and size of norm once."""
    if not evidence.reruns.real:
        return
    groups: dict[object, list[NormRecord]] = {}
    for norm in evidence.norms:
        if norm.module is not None and norm.spec is not None and norm.spec.gate is None and not norm.functional:
            key = (norm.class_name, norm.spec, norm.input_shape, norm.input_dtype)
            groups.setdefault(key, []).append(norm)
    for norms in groups.values():
        measured = _measure(norms[0], evidence)
        if measured is None:
            continue
        took, replaced = measured
        if took > FAR and took > _GAIN * replaced:
            yield finding(
                names(norms),
                f"takes {took:.1f} copies of its input ({list(norms[0].input_shape)}, {norms[0].input_dtype}); "
                f"normkit's norm of the same spec takes {replaced:.1f}",
                f"replace it: {took / replaced:.1f} times as fast here",
            )


def _measure(norm: NormRecord, evidence: Evidence) -> tuple[float, float] | None:
    """(the norm's time, its replacement's) in copies of the input; None where there is no replacement."""
    from normkit.audit.identify.probe import private_copy, undisturbed
    from normkit.functional.evaluate import compute

    assert norm.module is not None and norm.spec is not None
    spec, dtype = norm.spec, getattr(torch, norm.input_dtype)
    roles = ("weight", "bias") if norm.batch_statistics else ("weight", "bias", "running_mean", "running_var")
    given = {role: evidence.values(norm, role) for role in roles}
    held = {role: t for role, t in given.items() if t is not None}
    with torch.no_grad():
        x = torch.randn(norm.input_shape).to(dtype)
        room = torch.empty_like(x)
        try:
            with undisturbed():
                module = private_copy(norm.module).train(norm.module.training)
            for own, original in zip(module.parameters(), norm.module.parameters(), strict=True):
                own.data = own.data.to(original.dtype)
            runs: tuple[Callable[[], object], ...] = (
                lambda: room.copy_(x),
                lambda: module(x),
                lambda: compute(x, spec, **held),
            )
            copy_, own_time, replaced = (_time(run) for run in runs)
        except (Exception, SystemExit):  # foreign code
            return None
    return own_time / copy_, replaced / copy_


def _time(run: Callable[[], object]) -> float:
    """The fastest of several timings, each of enough calls to be told from the clock's step."""
    run()
    calls = 1
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if (passed := time.perf_counter() - start) >= _AT_LEAST:
            break
        calls *= 2
    timings = [passed / calls]
    for _ in range(_REPEATS - 1):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        timings.append((time.perf_counter() - start) / calls)
    return min(timings)
