"""A normalization taken apart: every step with its numbers, its geometry, its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit import reference
from normkit.explain import words
from normkit.explain.sets import check_shape, counted, set_ids
from normkit.spec import NormSpec


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of the formula, over the elements of one set."""

    symbol: str
    formula: str
    values: tuple[float, ...]
    """One number for a statistic, one for each element otherwise."""
    dtype: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The set as a vector of n coordinates, before gain and bias."""

    n: int
    length: float
    """The input's L2 norm."""
    along_ones: float
    """The length of its shadow on the all-ones direction: sqrt(n) |mean|. Centering removes it."""
    radius: float
    """x̂'s L2 norm: sqrt(n) less what eps takes (for an L2 norm, 1)."""
    ideal_radius: float
    """The radius without eps."""
    cosine: float
    """Between the input and x̂: 1 where the direction is kept."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What one output's gradient sends back to the set's inputs."""

    formula: str
    upstream: tuple[float, ...]
    """The gradient put on the set's outputs: 1 on the chosen element, 0 elsewhere."""
    dx: tuple[float, ...]
    along_ones: float
    """sum(dx): 0 where the mean is removed, up to rounding."""
    along_unit: float
    """sum(dx * x̂): 0 without eps, since a longer input gives the same output."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `explain` returns. ``to_dict`` is its JSON form."""

    spec: NormSpec
    title: str
    formula: str
    shape: tuple[int, ...]
    dtype: str
    at: tuple[int, ...]
    """The element whose set is shown."""
    sets: int
    """How many sets the input has, each with a statistic of its own."""
    where: tuple[tuple[int, ...], ...]
    """The positions of the set's elements in the input."""
    steps: tuple[Step, ...]
    geometry: Geometry
    gradient: Gradient
    output: Tensor
    """The whole result, as `normkit.reference.normalize` gives it."""

    def __getitem__(self, symbol: str) -> Step:
        """The step that computes a symbol; KeyError names the known ones."""
        for step in self.steps:
            if step.symbol == symbol:
                return step
        raise KeyError(f"no step named {symbol!r}; known are {', '.join(s.symbol for s in self.steps)}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "spec": self.spec.to_dict(),
            "title": self.title,
            "formula": self.formula,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "at": list(self.at),
            "sets": self.sets,
            "where": [list(i) for i in self.where],
            "steps": [{**vars(s), "values": list(s.values)} for s in self.steps],
            "geometry": dict(vars(self.geometry)),
            "gradient": {
                **vars(self.gradient),
                "upstream": list(self.gradient.upstream),
                "dx": list(self.gradient.dx),
            },
        }


def explain(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    at: tuple[int, ...] | None = None,
) -> Explanation:
    """Take the normalization of one element apart.

    Every number is the reference's own (`normkit.reference`), so the last step is its result bit for bit.

    Args:
        spec: what to compute. Without ``weight`` (or ``bias``) it is explained as if it had none.
        x: the input.
        weight, bias, gate, running_mean, running_var: as in `normkit.reference.normalize`.
        at: the index of the element to explain, by default the first; the set that shares its statistic is shown.

    Returns:
        An `Explanation`.

    Raises:
        TypeError: an input that is not floating point.
        ValueError: arguments that do not fit the spec or one another.
    """
    spec = spec.replace(has_weight=weight is not None, has_bias=bias is not None)
    spec = spec if gate is not None else spec.replace(gate=None)
    x = x.detach()
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point; got {x.dtype}: convert it first")
    check_shape(spec, x.shape)
    at = _check_at(at, x.shape)
    stored = {"running_mean": running_mean, "running_var": running_var}
    ids = set_ids(spec, x.shape)
    chosen = ids == ids[at]
    taken = _Taken(spec, x, weight, bias, gate, stored, chosen, at)
    return Explanation(
        spec=spec,
        title=words.title(spec),
        formula=words.formula(spec),
        shape=tuple(x.shape),
        dtype=_name(x.dtype),
        at=at,
        sets=int(ids.max()) + 1,
        where=tuple(tuple(i) for i in chosen.nonzero().tolist()),
        steps=tuple(taken.steps()),
        geometry=taken.geometry(),
        gradient=taken.gradient(),
        output=taken.output,
    )


class _Taken:
    """The intermediate values of one evaluation, and how they look in the chosen set."""

    def __init__(
        self,
        spec: NormSpec,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        stored: dict[str, Tensor | None],
        chosen: Tensor,
        at: tuple[int, ...],
    ) -> None:
        self.spec, self.x, self.weight, self.bias, self.gate, self.stored = spec, x, weight, bias, gate, stored
        self.chosen, self.at = chosen, at
        self.output = reference.normalize(x, spec, weight, bias, gate=gate, **stored)
        self.z = x.to(reference.compute_dtype(x.dtype, spec))
        self.gate_factor = None if gate is None else reference.activate(gate.to(self.z.dtype), spec)
        if self.gate_factor is not None and spec.gate is not None and spec.gate[1] == "before":
            self.z = self.z * self.gate_factor
        self.by_running = stored["running_mean"] is not None
        if self.by_running:
            mean, square = (
                reference.align(t, spec, x.dim()).to(self.z.dtype) for t in stored.values() if t is not None
            )
            self.mean, self.square = mean.expand_as(x), square.expand_as(x)
            plain = spec.replace(
                has_weight=False, has_bias=False, gate=None, rounding="after_gain", output_dtype="input"
            )
            self.unit = reference.normalize(self.z, plain, **stored)
        else:
            unit, measured = reference.standardize(self.z, spec, None)
            self.unit = unit
            found = measured.statistics()
            self.mean, self.square = self._spread(found.mean), self._spread(found.square)

    def _spread(self, statistic: Tensor) -> Tensor:
        """A statistic at each element that uses it."""
        return statistic.expand_as(reference.split(self.z, self.spec)).reshape(self.z.shape)

    def _here(self, values: Tensor) -> tuple[float, ...]:
        return tuple(values.expand(self.x.shape)[self.chosen].to(torch.float64).tolist())

    def _step(self, symbol: str, formula: str, values: Tensor, *, note: str = "") -> Step:
        return Step(symbol=symbol, formula=formula, values=self._here(values), dtype=_name(values.dtype), note=note)

    def _number(self, symbol: str, formula: str, values: Tensor, *, note: str = "") -> Step:
        value = float(values.expand(self.x.shape)[self.at])
        return Step(symbol=symbol, formula=formula, values=(value,), dtype=_name(values.dtype), note=note)

    def steps(self) -> list[Step]:
        spec, x, z = self.spec, self.x, self.z
        enters = counted(spec, x.shape)
        n = int((self.chosen & enters).sum())
        note = f"{_name(x.dtype)}, taken to {_name(z.dtype)}" if x.dtype != z.dtype else ""
        out = [self._step("x", "the input", x, note=note)]
        if self.gate_factor is not None and spec.gate is not None and spec.gate[1] == "before":
            out.append(self._step("gated x", f"x * {spec.gate[0]}(gate)", z))
        if self.by_running:
            out += [
                self._number("c", "the running mean", self.mean, note="stored, not measured"),
                self._step("x - c", "the mean removed", z - self.mean),
                self._number("s", "the running variance", self.square, note="stored, not measured"),
            ]
        else:
            if spec.centered:
                out.append(self._number("c", f"mean of {n}", self.mean))
                out.append(self._step("x - c", "the mean removed", z - self.mean))
            out.append(self._number("s", words.statistic(spec, n), self.square))
        out.append(self._number("d", words.divisor(spec), self._divisor()))
        unit = self.unit
        out.append(self._step("x̂", f"{words.numerator(spec)} / d", unit))
        if spec.rounding == "before_gain" and x.dtype != z.dtype:
            rounded = self.weight.dtype if spec.output_dtype == "weight" and self.weight is not None else x.dtype
            out.append(self._step("round(x̂)", f"rounded to {_name(rounded)}, before the gain", unit.to(rounded)))
        return out + self._affine_steps()

    def _affine_steps(self) -> list[Step]:
        spec, out = self.spec, []
        gain = reference.form_gain(self.weight, spec, self.x.dim(), self.z.dtype)
        if gain is not None:
            offset = f"{spec.weight_offset:g} + w" if spec.weight_offset else "w"
            out.append(self._step("gain", offset, gain))
        if self.bias is not None:
            out.append(self._step("b", "the bias", reference.align(self.bias, spec, self.x.dim())))
        after = spec.gate[1] == "after" if spec.gate is not None else False
        if after and spec.gate is not None and self.gate_factor is not None:
            out.append(self._step("a", f"{spec.gate[0]}(gate)", self.gate_factor))
        out.append(self._step("y", words.result(spec), self.output, note=words.rounding(spec, self.x.dtype)))
        return out

    def _divisor(self) -> Tensor:
        spec, s = self.spec, self.square
        if spec.eps_at == "variance":
            return (s + spec.eps).sqrt()
        return s.sqrt() + spec.eps if spec.eps_at == "std" else s.sqrt().clamp_min(spec.eps)

    def geometry(self) -> Geometry:
        enters = self.chosen & counted(self.spec, self.x.shape)
        x, unit = self.z[enters].to(torch.float64), self.unit[enters].to(torch.float64)
        n = x.numel()
        lengths = float(x.norm()), float(unit.norm())
        dot = float(x @ unit)
        return Geometry(
            n=n,
            length=lengths[0],
            along_ones=abs(float(x.sum())) / math.sqrt(n),
            radius=lengths[1],
            ideal_radius=_ideal_radius(self.spec, n),
            cosine=dot / (lengths[0] * lengths[1]) if lengths[0] * lengths[1] > 0 else math.nan,
        )

    def gradient(self) -> Gradient:
        upstream = torch.zeros_like(self.output)
        upstream[self.at] = 1
        x = self.x.clone().requires_grad_()
        y = reference.normalize(x, self.spec, self.weight, self.bias, gate=self.gate, **self.stored)
        (dx,) = torch.autograd.grad(y, x, upstream)
        here = dx[self.chosen & counted(self.spec, self.x.shape)].to(torch.float64)
        unit = self.unit[self.chosen & counted(self.spec, self.x.shape)].to(torch.float64)
        return Gradient(
            formula=words.gradient(self.spec, stored=self.by_running),
            upstream=self._here(upstream),
            dx=self._here(dx),
            along_ones=float(here.sum()),
            along_unit=float((here * unit).sum()),
        )


def _ideal_radius(spec: NormSpec, n: int) -> float:
    return {"mean_square": math.sqrt(n), "unbiased": math.sqrt(max(n - 1, 0)), "sum": 1.0}[spec.statistic]


def _check_at(at: tuple[int, ...] | None, shape: torch.Size) -> tuple[int, ...]:
    at = (0,) * len(shape) if at is None else tuple(at)
    if len(at) != len(shape) or any(not -n <= i < n for i, n in zip(at, shape, strict=True)):
        raise ValueError(f"at must be an index into shape {list(shape)}; got {list(at)}")
    return tuple(i % n for i, n in zip(at, shape, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
