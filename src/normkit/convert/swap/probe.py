"""One norm, old and new, on the inputs that it had in the model's run: outputs, gradients and buffers.

Both run on private copies, so that nothing of the model moves. The judge is the definition in float64: the new forward
may be no farther from it than the old one was, or than rounding explains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normkit import ops
from normkit.audit.identify.probe import NotANorm, private_copy, restored, tensors_of
from normkit.convert.proof import direction
from normkit.convert.receipt import Difference, Errors, deviation, deviations
from normkit.convert.swap.plan import HALF, Plan

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""The largest deviation from float64 over the largest value: sums in another order (float32), two roundings (half)."""
SLACK = 1.5
"""How much farther from float64 than the original, where that is itself farther than the limits."""
FLIPS = 0.02
"""The share of half-precision outputs with other bits: kernels differ by 1e-4, a wrong order of rounding by 8 % up."""
SAME = 1e-5
"""How far the original in float64 may be from the spec there: some compute in float32 all the same."""
_LARGEST = 2**20


@dataclass
class Sample:
    """What a norm was called with in the model's run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...] = ()
    """The input's, before it was cut to a size for probing."""
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def cast(self, dtype: torch.dtype) -> Sample:
        """With floating-point inputs in another dtype."""

        def to(t: Any) -> Any:
            return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t

        return replace(self, args=tree_map(to, self.args), kwargs=tree_map(to, self.kwargs), dtype=dtype)


def sample_of(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, *, rows: bool) -> Sample:
    """Keep a call's arguments, of a large input whose rows are independent only some rows."""
    cut = _cut(x) if rows else None

    def keep(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t.detach()
        return (t[cut] if cut is not None and t.shape == x.shape else t).clone()

    return Sample(tree_map(keep, args), tree_map(keep, kwargs), tuple(x.shape), x.stride(), x.dtype, x.device)


def _cut(x: Tensor) -> tuple[slice, ...] | None:
    """Leading dims shortened until few enough elements are left."""
    shape, cut = list(x.shape), []
    for d in range(x.dim() - 1):
        total = 1
        for n in shape:
            total *= n
        if total <= _LARGEST or d > 1:
            break
        shape[d] = max(1, shape[d] * _LARGEST // total)
        cut.append(slice(0, shape[d]))
    return tuple(cut) or None


def twin(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A private copy in its own modes that takes gradients, in another dtype if given.

    Raises:
        NotANorm: it cannot be copied.
    """

    def own(t: Tensor) -> Tensor:
        full = getattr(t, "full_tensor", None)  # a sharded parameter
        wanted = t.dtype if dtype is None or not t.is_floating_point() else dtype
        value = (t if full is None else full()).detach().to(dtype=wanted, copy=True)
        return nn.Parameter(value, requires_grad=value.is_floating_point()) if isinstance(t, nn.Parameter) else value

    made = private_copy(module, own)
    for part, was in zip(made.modules(), module.modules(), strict=False):
        part.training = was.training
    return made


@dataclass
class Outcome:
    """One call of one forward."""

    output: Any
    gradients: list[Tensor | None]
    buffers: dict[str, Tensor]
    operators: frozenset[str] = frozenset()


Forward = Callable[..., Any]


def call(module: nn.Module, forward: Forward, sample: Sample) -> Outcome:
    """Run a forward on a copy, and backward from fixed numbers. The copy's buffers are as before."""
    before = {name: t.clone() for name, t, holder, _ in tensors_of(module) if holder != "parameter"}
    inputs: list[Tensor] = []

    def fresh(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t.detach().clone()
        if t.is_floating_point():
            inputs.append(t.requires_grad_())
        return t

    args, kwargs = tree_map(fresh, sample.args), tree_map(fresh, sample.kwargs)
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    with torch.enable_grad():
        output, operators = ops.called(forward, module, *args, **kwargs)
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        seeds = [direction(t) for t in tensors]
        leaves = [*inputs, *parameters]
        gradients: list[Tensor | None] = [None] * len(leaves)
        if tensors:
            gradients = list(torch.autograd.grad(tensors, leaves, seeds, allow_unused=True))
    buffers = {}
    for name, t, _, _ in list(tensors_of(module)):
        if name in before:
            if not torch.equal(t, before[name]):
                buffers[name] = t.clone()
            t.copy_(before[name])
    return Outcome(output, gradients, buffers, operators)


@dataclass(frozen=True)
class Comparison:
    """Old and new forward in one mode."""

    errors: Errors
    reason: str
    """Why the new one is not taken; empty if it is."""
    native_before: frozenset[str] = frozenset()
    native: frozenset[str] = frozenset()
    """The native operators that each called."""
    flips: float = 0.0
    """The share of half-precision outputs with other bits."""


def compare(plan: Plan, module: nn.Module, sample: Sample, *, same_rounding: bool = False) -> Comparison:
    """Run both forwards of one norm (a private copy) in the mode that it is in."""
    old = call(module, type(module).forward, sample)
    new = call(module, lambda m, *a, **k: _new(plan, m, a, k), sample)
    y, z = new.output, old.output
    reason = ""
    if not isinstance(z, Tensor):
        reason = "it returns something else than one tensor"
    elif y is None:
        reason = _not_native() if z.is_cpu and not ops.report().loaded else "normkit does not take its arguments"
    elif y.dtype != z.dtype:
        reason = f"it returns {_dtype(z)} where normkit returns {_dtype(y)}"
    if reason:
        return Comparison(Errors(original=Difference()), reason, old.operators, new.operators)
    exact = call(module, lambda m, *a, **k: _exact(plan, m, a, k), sample)
    names = sorted(set(old.buffers) | set(new.buffers))
    state = deviations([new.buffers.get(n) for n in names], [old.buffers.get(n) for n in names])
    errors = Errors(
        original=Difference(
            outputs=max(deviation(y, z), state or 0.0), gradients=deviations(new.gradients, old.gradients)
        ),
        exact=_against(new, exact),
        noise=_against(old, exact),
    )
    flips = float((y != z).float().mean()) if y.dtype in HALF and y.numel() else 0.0
    few = flips <= max(FLIPS, 4 / max(1, y.numel()))
    reason = _wrong_spec(plan, module, sample) or _verdict(errors, y, state)
    # The order of rounding is part of a family's convention where features are normalized, and (unless asked for) only
    # there: of channel statistics torch's own kernels round in orders that differ from mode to mode.
    if not reason and not few and (same_rounding or (plan.literal and plan.spec.axes == "features")):
        reason = f"{flips:.0%} of its half-precision outputs would have other bits than the original's"
    return Comparison(errors, reason, old.operators, new.operators, 0.0 if few else flips)


def _wrong_spec(plan: Plan, module: nn.Module, sample: Sample) -> str:
    """Whether the original is something else than its spec on these inputs, looked at in float64: why, or nothing."""
    try:
        wide = twin(module, torch.float64)
        inputs = sample.cast(torch.float64)
        with torch.autocast(module_device(sample).type, enabled=False):
            old = call(wide, type(wide).forward, inputs)
            exact = call(wide, lambda m, *a, **k: _exact(plan, m, a, k), inputs)
        off = _against(old, exact).worst()
    except (NotANorm, RuntimeError, TypeError) as error:
        return f"it does not run in float64: {type(error).__name__}: {str(error)[:120]}"
    return "" if off <= SAME else f"it is off from its spec by {off:.1e} on these inputs, in float64"


def module_device(sample: Sample) -> torch.device:
    """Where a sample's norm runs."""
    return sample.device or torch.device("cpu")


def _against(found: Outcome, exact: Outcome) -> Difference:
    return Difference(
        outputs=deviation(found.output, exact.output), gradients=deviations(found.gradients, exact.gradients)
    )


def _new(plan: Plan, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    picked = plan.arguments.pick(args, kwargs)
    if picked is None or not isinstance(picked[0], Tensor) or (picked[1] is None) != (plan.spec.gate is None):
        return None
    return plan.run(module, *picked)


def _exact(plan: Plan, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    picked = plan.arguments.pick(args, kwargs)
    assert picked is not None
    return plan.exact(module, *picked)


def _verdict(errors: Errors, y: Tensor, state: float | None) -> str:
    """Why a norm is not swapped, or nothing."""
    limit = LIMITS[y.dtype]
    for what in ("outputs", "gradients"):
        new, old = getattr(errors.exact, what), getattr(errors.noise, what)
        if new is None and old is None:
            continue
        if new is None or old is None or not new <= max(limit, SLACK * old):
            return (
                f"its {what} would be off from float64 by {_said(new)} of their largest, the original's by {_said(old)}"
            )
    if state is not None and not state <= 1e-5 + (limit if y.dtype in HALF else 0):
        return f"its buffers would be off from the original's by {state:.1e} of their largest"
    return ""


def _said(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.1e}"


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _not_native() -> str:
    report = ops.report()
    return f"no native kernel here: {report.reason}" if not report.loaded else "no native kernel takes these tensors"


Regimes = dict[Any, dict[str, Any]]


def prove(
    plan: Plan, module: nn.Module, sample: Sample, known: Regimes, *, same_rounding: bool
) -> tuple[Plan | None, Comparison]:
    """(the plan as far as it is proven, the comparison in the model's own mode and dtype).

    Besides the module's own mode and dtype, which must hold, the other mode, half precision and autocast are tried;
    where one does not hold, the plan leaves it to the module's own forward. These depend on the plan alone, and are
    looked up in ``known`` for the next module that has it.
    """
    try:
        own = twin(module)
    except (NotANorm, RuntimeError, TypeError) as error:
        return None, Comparison(Errors(original=Difference()), f"it cannot be copied to be probed: {error}")
    device = module_device(sample)
    key = (type(module), plan.replace(constants=()), sample.shape, sample.stride, sample.dtype, module.training)
    with restored():
        if plan.stateful:
            plan = plan.replace(counter=known[key]["counter"] if key in known else counter_of(own, sample))
        keeps = known[key]["keeps_layout"] if key in known else _keeps_layout(plan, own, sample)
        plan = plan.replace(keeps_layout=keeps)
        found = compare(plan, own, sample, same_rounding=same_rounding)
        found = replace(found, reason=_reads_more(plan, own, sample) or found.reason)
        if found.native_before:
            reason = f"it runs on a native kernel already ({', '.join(sorted(found.native_before))})"
            return None, replace(found, reason=reason)
        if not found.reason and device.type == "cpu" and not found.native:
            found = replace(found, reason=_not_native())
        if found.reason:
            return None, found
        if key not in known:

            def holds(module: nn.Module, sample: Sample) -> bool:
                try:
                    return not compare(plan, module, sample, same_rounding=same_rounding).reason
                except Exception:  # foreign code in a mode or dtype that it may not be meant for
                    return False

            known[key] = {**_reach(module, own, sample, holds), "counter": plan.counter, "keeps_layout": keeps}
    return plan.replace(**known[key]), found


def _reach(
    module: nn.Module, own: nn.Module, sample: Sample, holds: Callable[[nn.Module, Sample], bool]
) -> dict[str, Any]:
    """In which modes a proven plan holds as well, in bfloat16, and under autocast for inputs of both widths."""
    with _flipped(own):
        other = holds(own, sample)
    narrow = sample.cast(torch.bfloat16)
    half = sample.dtype in HALF or holds(twin(module, torch.bfloat16), narrow)
    try:
        with torch.autocast(module_device(sample).type, torch.bfloat16):
            autocast = holds(own, sample) and holds(own, narrow)
    except RuntimeError:  # a device without
        autocast = False
    return {"modes": (False, True) if other else (module.training,), "half": half, "autocast": autocast}


def _reads_more(plan: Plan, module: nn.Module, sample: Sample) -> str:
    """Whether the result depends on a tensor that the plan does not read, an eps in a buffer say: why, or nothing.

    Such a number is a constant to the probes, and a checkpoint that is loaded later may hold another.
    """
    known = {plan.weight, plan.bias, plan.running_mean, plan.running_var, plan.counter}
    others = [(n, t, holder) for n, t, holder, _ in tensors_of(module) if n not in known and t.numel()]
    if not others:
        return ""
    before = call(module, type(module).forward, sample).output
    if not isinstance(before, Tensor):
        return ""
    for name, tensor, holder in others:
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor * 2 + 1)
        try:
            same = deviation(call(module, type(module).forward, sample).output, before) == 0
        except Exception:  # foreign code with numbers that it is not meant for
            same = False
        finally:
            with torch.no_grad():
                tensor.copy_(kept)
        if not same:
            return f"its result depends on the {holder} {name}, which no kernel reads"
    return ""


def _keeps_layout(plan: Plan, module: nn.Module, sample: Sample) -> bool:
    """Whether a result lies in memory as its transposed input does."""
    picked = plan.arguments.pick(sample.args, sample.kwargs)
    if picked is None or plan.spec.axes != "features" or plan.spec.channel_dim != -1 or picked[0].dim() < 3:
        return False

    def transposed(t: Any) -> Any:
        same = isinstance(t, Tensor) and t.shape == picked[0].shape
        return t.transpose(0, 1).contiguous().transpose(0, 1) if same else t

    args, kwargs = tree_map(transposed, sample.args), tree_map(transposed, sample.kwargs)
    x = plan.arguments.pick(args, kwargs)
    if x is None or x[0].is_contiguous():  # a dim of one: there is no other order
        return False
    with torch.no_grad():
        y = type(module).forward(module, *args, **kwargs)
    return isinstance(y, Tensor) and not y.is_contiguous()


@contextlib.contextmanager
def _flipped(module: nn.Module) -> Generator[None]:
    """The copy in its other mode."""
    before = [(part, part.training) for part in module.modules()]
    module.train(not module.training)
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def counter_of(module: nn.Module, sample: Sample) -> str | None:
    """The integer buffer that a training call raises by one."""
    before = {n: t.clone() for n, t, _, _ in tensors_of(module) if not t.is_floating_point() and t.numel() == 1}
    was = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        after = call(module, type(module).forward, sample).buffers
    except Exception:  # a batch of one, say: the mode is then not proven either
        after = {}
    for part, training in was:
        part.training = training
    counted = [n for n, t in after.items() if n in before and bool(t == before[n] + 1)]
    return counted[0] if len(counted) == 1 else None
