"""diff: two models' norms, one against the other."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.compare.activations import Capture, RunError, capture, converted, in_dtype, relative_error
from normkit.audit.compare.match import match
from normkit.audit.compare.result import Diff, Gap, Pair, Parting, Side
from normkit.audit.core import Survey, survey
from normkit.audit.numbers.gains import effective_gain, tensor_of
from normkit.audit.result import NormRecord
from normkit.spec import NormSpec

NOISE = 8.0
"""An error is real if it is past so many times what float32 rounding does to A alone, ..."""
FLOOR = 1e-6
"""... and past this: 16 units of float32's rounding, which another order of summation may well bring."""
FIXED = 1e-4
"""The limit where A does not run in float64."""


def diff(
    a: nn.Module,
    b: nn.Module,
    *example_args: Any,
    tolerance: float | None = None,
    inputs_b: tuple[Any, ...] | Mapping[str, Any] | None = None,
    **example_kwargs: Any,
) -> Diff:
    """Compare the norms of two models, and name the first at which their activations part.

    Norms are matched by order of execution and place, not by name, so that a port with other module names compares.
    On real weights both models are run in float32 on the same inputs, and A in float64 too: B parts from A where it is
    farther from A's float64 values than ``NOISE`` times A's own float32 run (and than ``FLOOR``).

    Args:
        a: the model that is right: the original.
        b: the model that is asked about: the port, the later checkpoint.
        example_args: what both are called with.
        tolerance: a fixed limit on the relative error, in place of the measured one.
        inputs_b: what B is called with, where its signature differs: positional arguments, or keyword arguments.
        example_kwargs: what both are called with. Where B has no such parameter it is given by position.

    Returns:
        A `Diff`; ``print(diff(a, b, x))`` is a table, ``to_dict()`` is JSON-ready.

    Raises:
        AuditError: one of the models does not run on the inputs.
    """
    args_b, kwargs_b = _inputs_of(b, example_args, example_kwargs, inputs_b)
    found_a, found_b = survey(a, example_args, example_kwargs), survey(b, args_b, kwargs_b)
    aligned = match(found_a.norms, found_b.norms)
    notes: list[str] = []
    gaps: dict[int, tuple[Gap, ...]] = {}
    output = None
    ran = not any(p.is_meta for model in (a, b) for p in model.parameters())
    if ran:
        try:
            runs = _Runs(a, b, found_a, found_b, (example_args, example_kwargs), (args_b, kwargs_b), tolerance, notes)
            gaps = {i: runs.gaps(x, y) for i, (x, y) in enumerate(aligned) if x is not None and y is not None}
            output = runs.output_error()
        except RunError as error:
            ran = False
            notes.append(f"activations were not compared: {error}")
    else:
        notes.append("activations were not compared: a model is on the meta device")
    pairs = tuple(_pair(a, b, x, y, gaps.get(i, ())) for i, (x, y) in enumerate(aligned))
    return Diff(
        a=type(a).__name__,
        b=type(b).__name__,
        pairs=pairs,
        parting=_parting(pairs) if ran else None,
        ran=ran,
        output=output,
        notes=tuple(notes),
    )


def _inputs_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: tuple[Any, ...] | Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if given is not None:
        return ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return args, kwargs
    known = {k: v for k, v in kwargs.items() if k in parameters}
    unknown = tuple(v for k, v in kwargs.items() if k not in parameters and isinstance(v, Tensor))
    return args + unknown, known


class _Runs:
    """A in float64 and float32, B in float32."""

    def __init__(
        self,
        a: nn.Module,
        b: nn.Module,
        found_a: Survey,
        found_b: Survey,
        inputs_a: tuple[tuple[Any, ...], dict[str, Any]],
        inputs_b: tuple[tuple[Any, ...], dict[str, Any]],
        tolerance: float | None,
        notes: list[str],
    ) -> None:
        self.tolerance = tolerance
        self.a = _run(a, found_a, inputs_a, torch.float32)
        self.b = _run(b, found_b, inputs_b, torch.float32)
        self.exact: Capture = {}
        if tolerance is None:
            try:
                self.exact = _run(a, found_a, inputs_a, torch.float64)
            except RunError as error:
                notes.append(f"A does not run in float64, so the limit is {FIXED:g} throughout: {error}")

    def error(self, key_a: tuple[str, int, str], key_b: tuple[str, int, str]) -> tuple[float | None, float]:
        """The error of B at one place, and its limit."""
        if key_a not in self.a or key_b not in self.b:
            return None, FIXED
        exact = self.exact.get(key_a)
        if self.tolerance is not None or exact is None:
            return relative_error(self.a[key_a], self.b[key_b]), self.tolerance or FIXED
        noise = relative_error(exact, self.a[key_a]) or 0.0
        return relative_error(exact, self.b[key_b]), max(FLOOR, NOISE * noise)

    def gaps(self, a: NormRecord, b: NormRecord) -> tuple[Gap, ...]:
        """One gap for each call that both models make."""
        found = []
        for call in range(min(a.calls, b.calls)):
            given, given_limit = self.error((a.name, call, "input"), (b.name, call, "input"))
            made, made_limit = self.error((a.name, call, "output"), (b.name, call, "output"))
            found.append(Gap(input=given, output=made, input_limit=given_limit, output_limit=made_limit))
        return tuple(found)

    def output_error(self) -> float | None:
        """The error of the models' outputs."""
        return self.error(("", 0, "output"), ("", 0, "output"))[0]


def _run(
    model: nn.Module, found: Survey, inputs: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype
) -> Capture:
    args, kwargs = converted(inputs, dtype)
    try:
        return capture(in_dtype(model, dtype), found.sites.norms, args, kwargs)
    except (RuntimeError, TypeError) as error:  # a model that cannot be copied or converted
        raise RunError(f"{type(model).__name__} in {dtype}: {' '.join(str(error).split())[:160]}") from error


def _pair(a: nn.Module, b: nn.Module, x: NormRecord | None, y: NormRecord | None, gaps: tuple[Gap, ...]) -> Pair:
    if x is None or y is None:
        return Pair(a=x, b=y, fields={})
    biases = tensor_of(x, "bias", a), tensor_of(y, "bias", b)
    return Pair(
        a=x,
        b=y,
        fields=_fields(x, y),
        gain=_apart(effective_gain(x, a), effective_gain(y, b)),
        bias=_apart(*biases),
        gaps=gaps,
    )


def _fields(a: NormRecord, b: NormRecord) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name in ("kind", "placement", "calls"):
        found[name] = getattr(a, name), getattr(b, name)
    found["features"] = a.input_shape[-1:], b.input_shape[-1:]
    found["batch_statistics"] = a.batch_statistics, b.batch_statistics
    if a.spec is not None and b.spec is not None:
        x, y = a.spec.canonical(), b.spec.canonical()
        found |= {f.name: (getattr(x, f.name), getattr(y, f.name)) for f in dataclass_fields(NormSpec)}
        if abs(x.eps - y.eps) <= 0.02 * max(x.eps, y.eps):  # the precision to which an eps is measured
            del found["eps"]
    elif (a.spec is None) != (b.spec is None):
        found["reason"] = a.reason, b.reason
    return {name: values for name, values in found.items() if values[0] != values[1]}


def _apart(a: Tensor | None, b: Tensor | None) -> float | None:
    if a is None or b is None or a.numel() != b.numel() or a.numel() == 0:
        return None
    a, b = a.double().flatten().cpu(), b.double().flatten().cpu()
    size = a.abs().max().item()
    return ((a - b).abs().max().item() / size) if size else b.abs().max().item()


def _parting(pairs: tuple[Pair, ...]) -> Parting | None:
    """The first place where B is farther from A than rounding explains."""
    after: str | None = None
    order = sorted(((call, i) for i, p in enumerate(pairs) for call in range(len(p.gaps))), key=lambda c: (c[0], c[1]))
    for call, index in order:
        pair = pairs[index]
        gap = pair.gaps[call]
        for side, error, limit in (("input", gap.input, gap.input_limit), ("output", gap.output, gap.output_limit)):
            if error is not None and not error <= limit:
                where: Side = "input" if side == "input" else "output"
                return Parting(pair=pair, call=call, side=where, error=error, limit=limit, after=after)
        after = pair.name if gap.output is not None else after
    return None
