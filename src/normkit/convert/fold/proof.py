"""The proof of a fold: copies of the model, before and after, in float64 and in the model's own dtype."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normkit.audit.identify.probe import restored
from normkit.convert.edit import Edit, Editor
from normkit.convert.receipt import ConversionError, Difference, Errors, Receipt, deviation, deviations
from normkit.errors import described

EXACT = 1e-12
"""Outputs of both in float64: rounding of a few thousand terms, each 1e-16, and nothing else."""
EXACT_GRADIENT = 1e-10
"""Gradients pass every layer twice and are summed over all positions."""
ROUNDED = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Outputs of both in the model's dtype; a half-precision model is held to its own rounding alone."""
NOISE = 2.0
"""The converted may be this many times as far from float64 as the original: its weights are rounded once more."""

_NARROW = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDER = {**_NARROW, torch.complex64: torch.complex128, torch.complex32: torch.complex128}


class Widened(TorchDispatchMode):
    """Makes a cast or a factory that asks for a narrower float give float64.

    A model in float64 still computes its norms in float32 where its code says ``x.float()``; under this mode it does
    not, so that two ways to compute the same thing can be told from two that differ.
    """

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        asked = kwargs.get("dtype")
        if asked in _WIDER:
            kwargs["dtype"] = _WIDER[asked]
        if func.overloadpacket is torch.ops.aten._grouped_mm and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The product of experts, which torch has for narrower dtypes only."""
    if offs is None:
        return torch.bmm(a, b)
    ends = offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if a.dim() == 2 and b.dim() == 3:
        made = a.new_zeros(a.shape[0], b.shape[2])
        for span, matrix in zip(spans, b, strict=True):
            made[span] = a[span] @ matrix
        return made
    if a.dim() == 3:
        return torch.cat([matrix @ b[:, span] for span, matrix in zip(spans, a, strict=True)], dim=1)
    return torch.stack([a[:, span] @ b[span] for span in spans])


@dataclass(frozen=True)
class Example:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def wide(self) -> Example:
        """With floating point tensors in float64."""

        def widen(x: Tensor) -> Tensor:
            return x.double() if x.is_floating_point() else x

        return Example(tree_map_only(Tensor, widen, self.args), tree_map_only(Tensor, widen, dict(self.kwargs)))


@dataclass(kw_only=True)
class FoldReceipt(Receipt):
    """A receipt that says too how far the converted model is from the original when both run in float64."""

    float64: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `Receipt.to_dict`, with ``float64``."""
        return {**super().to_dict(), "float64": None if self.float64 is None else self.float64.to_dict()}


@dataclass(frozen=True)
class Run:
    """What one run gave: its tensors, and the gradients of its parameters and inputs."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]


def twin(model: nn.Module, *, wide: bool) -> nn.Module:
    """A deep copy, in float64 if ``wide``."""
    made = copy.deepcopy(model)
    return made.double() if wide else made


def run(model: nn.Module, example: Example, *, wide: bool) -> Run:
    """Run a copy and differentiate a fixed random projection of what it returns.

    Raises:
        ConversionError: the model raised.
    """
    given = example.wide() if wide else example
    inputs = {f"input {n}": x for n, x in enumerate(_floats((given.args, dict(given.kwargs))))}
    with restored():
        torch.manual_seed(0)
        try:
            return _run(model, given, inputs, wide)
        except Exception as error:  # foreign code
            where = "in float64" if wide else "on these inputs"
            raise ConversionError(
                f"{type(model).__name__} could not be run {where} ({described(error)}): nothing is proved"
            ) from error


def _run(model: nn.Module, given: Example, inputs: dict[str, Tensor], wide: bool) -> Run:
    leaves = {id(x): x.detach().clone().requires_grad_() for x in inputs.values()}
    args, kwargs = tree_map_only(Tensor, lambda x: leaves.get(id(x), x), (given.args, dict(given.kwargs)))
    parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    with torch.enable_grad():
        if wide:
            with Widened():
                outputs = _floats(model(*args, **kwargs))
        else:
            outputs = _floats(model(*args, **kwargs))
        wanted = {**parameters, **{name: leaves[id(x)] for name, x in inputs.items()}}
        gradients = _gradients(outputs, wanted, wide)
    return Run(tuple(x.detach() for x in outputs), gradients)


def _gradients(outputs: Sequence[Tensor], wanted: Mapping[str, Tensor], wide: bool) -> dict[str, Tensor | None]:
    live = [x for x in outputs if x.requires_grad]
    if not live or not wanted:
        return {}
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype) for x in live]
    if wide:
        with Widened():
            found = torch.autograd.grad(live, list(wanted.values()), seeds, allow_unused=True)
    else:
        found = torch.autograd.grad(live, list(wanted.values()), seeds, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _floats(structure: Any) -> list[Tensor]:
    return [x for x in tree_leaves(structure) if isinstance(x, Tensor) and x.is_floating_point()]


def difference(got: Run, expected: Run, touched: set[str]) -> Difference:
    """How far two runs are apart; gradients of what both have and neither changed.

    A gradient's error is relative to its own largest entry, or to a thousandth of the largest of all: some gradients
    are zero but for rounding (a bias before a norm that removes it).
    """
    common = [n for n in expected.gradients if n in got.gradients and n not in touched]
    floor = 1e-3 * max(
        (float(g.abs().max()) for n in common if (g := expected.gradients[n]) is not None and g.numel()), default=0.0
    )
    return Difference(
        outputs=deviations(got.outputs, expected.outputs),
        gradients=worst_of([_apart(got.gradients[n], expected.gradients[n], floor) for n in common]),
    )


def _apart(got: Tensor | None, expected: Tensor | None, floor: float) -> float:
    if got is None or expected is None:
        return 0.0 if got is expected else torch.inf
    found = deviation(got, expected)
    if found in (0.0, torch.inf):
        return found
    largest = float(expected.abs().max())
    return found * largest / max(largest, floor) if largest > 0 else float(got.abs().max()) / max(floor, 1e-300)


def worst_of(found: Sequence[float]) -> float | None:
    """The largest; None of none. NaN is worse than anything."""
    return max((torch.inf if x != x else x for x in found), default=None)


class Proof:
    """What edits of a model change, measured on copies: the model itself is not run.

    Args:
        model: the original.
        example: what to call it with.
    """

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.model = model
        self.example = example
        self.exact = run(twin(model, wide=True), example, wide=True)
        self._own: Run | None = None

    def float64(self, edits: Sequence[Edit]) -> Difference:
        """Converted against original, both in float64."""
        made = twin(self.model, wide=True)
        editor = Editor(made)
        for edit in edits:
            edit(editor)
        return difference(run(made, self.example, wide=True), self.exact, editor.touched)

    def own(self, edits: Sequence[Edit]) -> Errors:
        """In the model's own dtype, against the original and against float64."""
        if self._own is None:
            self._own = run(twin(self.model, wide=False), self.example, wide=False)
        made = twin(self.model, wide=False)
        editor = Editor(made)
        for edit in edits:
            edit(editor)
        got = run(made, self.example, wide=False)
        return Errors(
            original=difference(got, self._own, editor.touched),
            exact=difference(got, self.exact, editor.touched),
            noise=difference(self._own, self.exact, editor.touched),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest dtype among the outputs and the parameters."""
        found = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        found |= {x.dtype for x in (self._own.outputs if self._own is not None else ())}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def failure(found: Difference) -> str | None:
    """Why two float64 runs are not the same function, or None."""
    if found.outputs is None:
        return "the model returns no floating point tensor to compare"
    if not found.outputs <= EXACT:
        return f"in float64 the outputs differ by {found.outputs:.1e}, more than {EXACT:.0e}"
    if found.gradients is not None and not found.gradients <= EXACT_GRADIENT:
        return f"in float64 the gradients differ by {found.gradients:.1e}, more than {EXACT_GRADIENT:.0e}"
    return None


def failure_in(dtype: torch.dtype, found: Errors) -> str | None:
    """Why a conversion that is exact in float64 loses too much in the model's own dtype, or None."""
    apart, exact, noise = (e.outputs or 0.0 for e in (found.original, found.exact, found.noise))
    if apart <= ROUNDED.get(dtype, 0.0) or exact <= NOISE * noise:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"in {name} the outputs are off by {exact:.1e} from float64, where the original is off by {noise:.1e}"
