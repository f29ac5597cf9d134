"""A whole model before and after: outputs, gradients and buffers of the same run, and its own rounding noise.

Nothing of the model moves: a run starts from the same random state and the same buffers, and both are put back.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normkit.audit.identify.probe import has_values, private_copy, restored, tensors_of
from normkit.audit.trace.recorder import same_attributes
from normkit.convert.receipt import ConversionError, Difference, deviation

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""The largest deviation over the largest value that a model of a dtype may show, in half precision two units in the
last place of the largest; beyond, its own noise decides."""
NOISE = 2.0
"""How many times the model's own distance from float64 two roundings of it may be apart."""
_FLOOR = 1e-3
"""Gradients below this share of the model's largest are measured against that share: some are zero but for rounding."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run gave."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None] | None
    """By parameter, and by input. None where no backward ran."""
    buffers: dict[str, Tensor]
    """Those that the run changed."""
    random: bool
    """Whether it drew random numbers."""


def run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, gradients: bool) -> Run:
    """Run a model, and backward from fixed directions at its outputs. Gradients are returned, not accumulated.

    Args:
        model: any module; it comes out as it went in.
        args, kwargs: what to call it with; they are copied.
        gradients: whether to run backward.
    """
    leaves: dict[str, Tensor] = {}
    args, kwargs = fresh(args, leaves if gradients else None), fresh(dict(kwargs), leaves if gradients else None)
    with restored(), same_attributes(model), same_buffers(model) as changed, torch.set_grad_enabled(gradients):
        before = torch.get_rng_state()
        outputs = floats_in(model(*args, **kwargs))
        random = not torch.equal(before, torch.get_rng_state())
        found = _gradients(model, outputs, leaves) if gradients else None
        return Run([t.detach() for t in outputs], found, changed(), random)


def step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, gradients: bool) -> None:
    """One call to be timed, with backward or without."""
    with torch.set_grad_enabled(gradients):
        outputs = floats_in(model(*fresh(args), **fresh(dict(kwargs))))
        if gradients:
            _gradients(model, outputs, {})


def _gradients(model: nn.Module, outputs: list[Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor | None] | None:
    ends = [t for t in outputs if t.requires_grad]
    starts = {n: p for n, p in model.named_parameters() if p.requires_grad} | inputs
    if not ends or not starts:
        return None
    directions = [direction(t) for t in ends]
    found = torch.autograd.grad(ends, list(starts.values()), directions, allow_unused=True)
    return dict(zip(starts, found, strict=True))


def direction(y: Tensor) -> Tensor:
    """What a gradient starts from at an output: the same seeded numbers in every dtype."""
    generator = torch.Generator().manual_seed(20240229)
    numbers = torch.randn(y.shape, generator=generator, dtype=torch.float32).bfloat16()
    return numbers.to(device=y.device, dtype=y.dtype)


def fresh(value: Any, leaves: dict[str, Tensor] | None = None, name: str = "input") -> Any:
    """A copy of example arguments, which a forward may write into; its floating tensors collected to take gradients."""
    if isinstance(value, Tensor):
        made = value.detach().clone()
        if leaves is not None and made.is_floating_point():
            leaves[f"{name} {len(leaves)}"] = made.requires_grad_()
        return made
    if type(value) in (list, tuple):
        return type(value)(fresh(v, leaves, name) for v in value)
    if type(value) is dict:
        return {k: fresh(v, leaves, str(k)) for k, v in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a file: shared then
        return value


def floats_in(output: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returns."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [t for v in output.values() for t in floats_in(v)]
    if isinstance(output, list | tuple):
        return [t for v in output for t in floats_in(v)]
    if dataclasses.is_dataclass(output):
        return [t for f in dataclasses.fields(output) for t in floats_in(getattr(output, f.name))]
    return []


@contextlib.contextmanager
def same_buffers(model: nn.Module) -> Generator[Callable[[], dict[str, Tensor]]]:
    """Buffers (and tensors held as plain attributes) are as before; the value tells which changed, and to what."""
    kept = {n: (t, t.clone()) for n, t, holder, _ in tensors_of(model) if holder != "parameter" and not t.is_meta}

    def changed() -> dict[str, Tensor]:
        return {n: t.clone() for n, (t, was) in kept.items() if not _same(t, was)}

    try:
        yield changed
    finally:
        with torch.no_grad():
            for t, was in kept.values():
                if not _same(t, was):
                    t.detach().copy_(was)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not has_values(a):
        return a.shape == b.shape
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()))


def difference(new: Run, old: Run) -> Difference:
    """How far two runs are apart; buffers that they changed count as outputs."""
    if len(new.outputs) != len(old.outputs):
        return Difference(outputs=torch.inf, gradients=torch.inf)
    pairs = list(zip(new.outputs, old.outputs, strict=True))
    pairs += [(new.buffers.get(n), old.buffers.get(n)) for n in sorted(set(new.buffers) | set(old.buffers))]  # type: ignore[list-item]
    outputs = [torch.inf if a is None or b is None else deviation(a, b) for a, b in pairs]
    return Difference(outputs=max(outputs, default=None), gradients=_between(new.gradients, old.gradients))


def _between(new: dict[str, Tensor | None] | None, old: dict[str, Tensor | None] | None) -> float | None:
    """The worst deviation of a gradient over its largest value (or a share of the largest of all)."""
    if new is None or old is None or not old:
        return None if new is None and old is None else torch.inf
    sizes = {n: _size(g) for n, g in old.items() if g is not None}
    floor = _FLOOR * max(sizes.values(), default=0.0)
    found = [0.0]
    for name in new.keys() | old.keys():
        a, b = new.get(name), old.get(name)
        if a is None and b is None:
            continue
        if a is None or b is None:
            found.append(torch.inf)
            continue
        size = sizes[name]
        if size == 0 and floor > 0:
            found.append(_size(a) / floor)
        else:
            found.append(deviation(a, b) * min(1.0, size / floor if floor > 0 else 1.0))
    return max(found, key=lambda v: torch.inf if v != v else v)


def _size(t: Tensor) -> float:
    return float(t.detach().abs().max()) if t.numel() else 0.0


def limits(dtype: torch.dtype, noise: Difference, strict: float | None) -> Difference:
    """What outputs and gradients may be off by."""
    if strict is not None:
        return Difference(outputs=strict, gradients=strict)
    least = LIMITS.get(dtype, LIMITS[torch.float32])
    twice = 2 * least if dtype.itemsize == 2 else least  # gradients are rounded on the way there and back
    return Difference(
        outputs=max(least, NOISE * (noise.outputs or 0.0)), gradients=max(twice, NOISE * (noise.gradients or 0.0))
    )


def check(found: Difference, allowed: Difference, conversion: str) -> None:
    """Refuse what is farther off than allowed.

    Raises:
        ConversionError: with both values.
    """
    what = exceeding(found, allowed)
    if what:
        raise ConversionError(
            f"{conversion} is undone: the model's {what} would be off by {getattr(found, what):.2g} of their largest, "
            f"and {getattr(allowed, what):.2g} is allowed"
        )


def exceeding(found: Difference, allowed: Difference) -> str:
    """``"outputs"`` or ``"gradients"``, whichever is farther off than allowed; else ``""``."""
    for what in ("outputs", "gradients"):
        off = getattr(found, what)
        if off is not None and not off <= getattr(allowed, what):
            return what
    return ""


def main_dtype(model: nn.Module) -> torch.dtype:
    """The floating dtype that most of a model's parameters have."""
    counts: dict[torch.dtype, int] = {}
    for p in model.parameters():
        if p.is_floating_point():
            counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    return max(counts, key=lambda d: counts[d]) if counts else torch.get_default_dtype()


def wide_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in a wider dtype and the same modes, without hooks."""

    def own(t: Tensor) -> Tensor:
        value = t.detach().to(dtype=dtype if t.is_floating_point() else t.dtype, copy=True)
        return nn.Parameter(value, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else value

    made = private_copy(model, own)
    for part, was in zip(made.modules(), model.modules(), strict=False):
        part.training = was.training
    return made


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Example arguments with floating-point tensors in another dtype."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, value)
