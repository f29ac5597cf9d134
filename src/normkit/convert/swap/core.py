"""swap: find the norms, prove each one on its own inputs, change their classes, prove the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normkit import ops
from normkit.audit import AuditError, NormRecord, audit
from normkit.audit.identify.probe import NotANorm, restored, tensors_of
from normkit.audit.inputs import InputError, guess_inputs
from normkit.audit.report import describe
from normkit.convert import proof, timing
from normkit.convert.receipt import Change, ConversionError, Difference, Errors, Receipt, Refusal
from normkit.convert.swap.plan import HALF, Plan, arguments_of, constants_of, has_operator
from normkit.convert.swap.probe import Sample, prove, sample_of, twin
from normkit.convert.swap.reclass import base_of, give_back, plan_of, swapped_class
from normkit.spec import NormSpec

_ROUNDS = 12
_FLOAT64_BYTES = 2**31


@dataclass(kw_only=True)
class SwapReceipt(Receipt):
    """A `Receipt` with the names that a swap has for its parts."""

    conversion: str = "swap"

    @property
    def swapped(self) -> tuple[str, ...]:
        """The names of the norms that run on normkit now."""
        return tuple(c.name for c in self.changed)

    @property
    def skipped(self) -> tuple[Refusal, ...]:
        """(name, reason) of those that do not."""
        return self.refused


@dataclass
class _Norm:
    """One norm on its way."""

    record: NormRecord
    module: nn.Module
    plan: Plan
    base: type[nn.Module]
    sample: Sample | None = None
    errors: Errors | None = None
    change: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Options:
    strict: float | None
    only_faster: bool
    same_rounding: bool
    gradients: bool
    float64: bool | None
    rounds: int


def swap(
    model: nn.Module,
    *example_args: Any,
    strict: float | None = None,
    only_faster: bool = True,
    same_rounding: bool = False,
    gradients: bool = True,
    float64: bool | None = None,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
    **example_kwargs: Any,
) -> SwapReceipt:
    """Give a model's norms normkit's kernels, in place, and prove that the model computes the same.

    Each norm is identified by what it does (`normkit.audit`), and probed on the inputs that it has in a run of the
    model: outputs and gradients, against its own forward and against float64. Those that match, that a kernel computes
    and that get no slower are given another class, a subclass of their own with another forward. Parameters, buffers,
    names, hooks, state_dict and ``isinstance`` stay. Then the whole model runs before and after. Where the proof does
    not reach (another mode or dtype, other arguments, a transform), a swapped norm runs its own forward; so it does
    for good once one of its plain attributes is set to another value, an eps say, with a warning.

    Args:
        model: any module, in the mode and dtype that it is used in.
        example_args: what to call it with. Without any, inputs are guessed from a transformers model's config.
        strict: the largest deviation of the model's outputs and gradients that is accepted, over their largest value.
            By default 1e-4 in float32, and in half precision twice the model's own distance from float64.
        only_faster: leave norms alone that would be slower. A norm that is slower only without (or only with) a
            gradient to record keeps its own forward there.
        same_rounding: leave norms alone, in half precision, that round at every step: no kernel does, and one that
            rounds once is nearer to float64 and has other bits.
        gradients: whether to compare gradients of the whole model as well (each norm's own always are).
        float64: whether to run the whole model in float64 too, on a copy; by default if that takes up to 2 GiB.
        rounds: how often to time the whole model before and after; 0 not to.
        progress: called with a word on what is being done.
        example_kwargs: what to call it with.

    Returns:
        A `SwapReceipt`: ``swapped``, ``skipped`` with reasons, errors, speed; ``undo()`` gives everything back.

    Raises:
        ConversionError: the model is on the meta device or cannot be run, or the proof failed; it is then as it was.
        TypeError: ``model`` is no module.
    """
    _check(model, strict, rounds)
    if not example_args and not example_kwargs:
        example_kwargs = _guessed(model)
    options = _Options(strict, only_faster, same_rounding, gradients, float64, rounds)
    with torch.compiler.set_stance("force_eager"):
        return _swap(model, example_args, example_kwargs, options, progress)


def _check(model: object, strict: float | None, rounds: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if strict is not None and not strict >= 0:
        raise ValueError(f"strict must be None or a number >= 0; got {strict!r}")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
        raise ValueError(f"rounds must be an integer >= 0; got {rounds!r}")
    for name, tensor, _, _ in tensors_of(model):
        if tensor.is_meta:
            raise ConversionError(
                f"{name} is on the meta device, and a swap is proven by running the model: load its weights first"
            )


def _guessed(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    try:
        if config is None:
            raise InputError(f"{type(model).__name__} has no config to guess inputs from")
        inputs = guess_inputs(model, config)
    except InputError as error:
        raise ConversionError(f"{error}; give example inputs: normkit.swap(model, x)") from error
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = proof.main_dtype(model)
    return {n: (t.to(device, dtype) if t.is_floating_point() else t.to(device)) for n, t in inputs.items()}


def _swap(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: _Options,
    progress: Callable[[str], None],
) -> SwapReceipt:
    try:
        found = audit(model, *args, progress=progress, **kwargs)
    except AuditError as error:
        raise ConversionError(str(error)) from error
    refused: list[Refusal] = []
    norms: list[_Norm] = []
    for record in found.norms:
        norm = _planned(record, options)
        if isinstance(norm, str):
            refused.append(Refusal(record.name, norm))
        else:
            norms.append(norm)
    if norms:
        progress("running the model before")
        with _recording(norms):
            before = proof.run(model, args, kwargs, gradients=options.gradients)
        norms = _proven(norms, options, refused, progress)
    order = {r.name: i for i, r in enumerate(found.norms)}
    refused.sort(key=lambda r: order[r.name])
    if not norms:
        return SwapReceipt(model=type(model).__name__, refused=tuple(refused), revert=lambda: None)
    notes: list[str] = []
    exact = _float64_run(model, norms, args, kwargs, options, before.random, notes, progress)
    progress("running the model after")
    _give(norms)
    try:
        errors = _compare(model, args, kwargs, options, before, exact)
        speeds = _time_model(model, norms, args, kwargs, options, progress)
    except BaseException:
        for norm in norms:
            if type(norm.module) is not norm.base:
                give_back(norm.module)
        raise
    changed = tuple(Change(name=n.record.name, what=_what(n), errors=n.errors, **n.change) for n in norms)
    return SwapReceipt(
        model=type(model).__name__,
        changed=changed,
        refused=tuple(refused),
        errors=errors,
        notes=tuple(notes),
        revert=_undo(norms),
        **speeds,
    )


def _what(norm: _Norm) -> str:
    text = describe.what(norm.record)
    if not norm.plan.literal and norm.sample is not None and _dtype_of(norm) in HALF:
        text += ", rounded once"
    if norm.plan.inference != norm.plan.gradient:
        text += ", where a gradient is recorded" if norm.plan.gradient else ", where no gradient is recorded"
    return text


# ---- which norms, and how ----


def _planned(record: NormRecord, options: _Options) -> _Norm | str:
    """A norm with its plan, or why it has none."""
    module, spec, identified = record.module, record.spec, record.identification
    if record.functional or module is None:
        return "written inline, in a forward that does more: there is no module to change"
    if spec is None or identified is None:
        return f"no NormSpec says what it computes: {record.reason}"
    if plan_of(module) is not None:
        return "swapped already"
    refusal = _unfit(module)
    if refusal:
        return refusal
    if identified.residual is not None:
        return "it adds a residual itself"
    arguments = arguments_of(type(module).forward, identified)
    if arguments is None:
        return "its forward has no plain signature"
    stored = spec.frozen or spec.running is not None
    kernel, literal = spec, True
    if not has_operator(spec, stored=stored):
        kernel = spec.canonical(float32_only=True)
        literal = False
        if not has_operator(kernel, stored=stored):
            return "no kernel computes its spec"
    plan = Plan(spec, kernel, arguments, **record.parameters, constants=constants_of(module), literal=literal)
    return _Norm(record, module, plan, type(module))


def _unfit(module: nn.Module) -> str:
    """What stands in the way of another class."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module: its class cannot be changed"
    if "forward" in vars(module):
        return "its forward was replaced on the instance: remove the wrapper, swap, and wrap again"
    if isinstance(module, nn.SyncBatchNorm):  # what it shares with other processes, no run of one of them shows
        return "it shares its statistics between processes"
    for name, child in module.named_modules():
        if child is module:
            continue
        if any(True for _ in tensors_of(child)) or child._forward_hooks or child._forward_pre_hooks:
            return f"it calls {name}, a module with tensors or hooks of its own"
    return ""


@contextlib.contextmanager
def _recording(norms: Sequence[_Norm]) -> Generator[None]:
    """Keep what each norm is first called with."""
    handles = []
    for norm in norms:

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], norm: _Norm = norm) -> None:
            picked = norm.plan.arguments.pick(args, kwargs) if norm.sample is None else None
            if picked is not None and isinstance(picked[0], Tensor):
                norm.sample = sample_of(args, kwargs, picked[0], rows=_independent(norm.plan.spec))

        handles.append(norm.module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _independent(spec: NormSpec) -> bool:
    """Whether leading dims may be cut without changing the rows that are left."""
    return spec.axes == "features" and spec.channel_dim == -1 and spec.weight_shape != "per_head"


def _proven(
    norms: Sequence[_Norm], options: _Options, refused: list[Refusal], progress: Callable[[str], None]
) -> list[_Norm]:
    """Those that match, and are no slower."""
    timed: dict[Any, dict[str, Any] | str] = {}
    kept = []
    for norm in norms:
        progress(f"probing {norm.record.name}")
        reason = _prove_one(norm, options) or _time_one(norm, options, timed)
        if reason:
            refused.append(Refusal(norm.record.name, reason))
        else:
            kept.append(norm)
    return kept


def _prove_one(norm: _Norm, options: _Options) -> str:
    if norm.sample is None:
        return "it is called with more than an input and a gate"
    plan, norm.errors, reason = prove(norm.plan, norm.module, norm.sample)
    if plan is None:
        return reason
    if options.same_rounding and not plan.literal:
        plan = plan.replace(half=False)
        if _dtype_of(norm) in HALF:
            return "it rounds at every step, which no kernel does"
    norm.plan = plan
    return ""


def _dtype_of(norm: _Norm) -> torch.dtype:
    assert norm.sample is not None
    picked = norm.plan.arguments.pick(norm.sample.args, norm.sample.kwargs)
    assert picked is not None
    return picked[0].dtype


# ---- speed ----


def _time_one(norm: _Norm, options: _Options, timed: dict[Any, dict[str, Any] | str]) -> str:
    """Old against new at the shape that the norm had; each distinct case once. Why not, or nothing."""
    if not options.only_faster:
        return ""
    sample = norm.sample
    assert sample is not None
    unlike = norm.plan.replace(constants=())
    key = (norm.base, unlike, sample.shape, sample.stride, _dtype_of(norm), sample.device, norm.module.training)
    if key not in timed:
        timed[key] = _timings(norm, sample)
    found = timed[key]
    if isinstance(found, str):
        return found
    norm.change = {k: v for k, v in found.items() if k in ("speed", "backward_speed")}
    norm.plan = norm.plan.replace(inference=found["inference"], gradient=found["gradient"])
    return ""


def _timings(norm: _Norm, sample: Sample) -> dict[str, Any] | str:
    with restored():
        module = twin(norm.module)
        args, kwargs = _full(norm, sample)
        new_class = swapped_class(norm.base, norm.plan)
        forwards = [norm.base.forward, new_class.forward]

        def infer(forward: Callable[..., Any]) -> Callable[[], Any]:
            def call() -> Any:
                with torch.no_grad():
                    return forward(module, *args, **kwargs)

            return call

        leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        starts = [*(t.requires_grad_() for t in leaves), *(p for p in module.parameters() if p.is_floating_point())]
        seed = torch.ones_like(infer(forwards[0])())

        def learn(forward: Callable[..., Any]) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(forward(module, *args, **kwargs), starts, seed, allow_unused=True)

        inference = timing.interleave([infer(f) for f in forwards], _ROUNDS, sample.device)
        training = timing.interleave([learn(f) for f in forwards], _ROUNDS, sample.device)
    slow = timing.is_slower(inference), timing.is_slower(training)
    if all(slow):
        ratio, both = timing.speed(inference).ratio, timing.speed(training).ratio
        return f"normkit would be slower here: {ratio:.2f}x, with backward {both:.2f}x"
    return {
        "speed": timing.speed(inference),
        "backward_speed": timing.speed(training),
        "inference": not slow[0],
        "gradient": not slow[1],
    }


def _full(norm: _Norm, sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample's arguments at the size that they had."""
    picked = norm.plan.arguments.pick(sample.args, sample.kwargs)
    assert picked is not None
    cut = tuple(picked[0].shape)

    def whole(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if tuple(t.shape) == cut != sample.shape:
            return torch.randn(sample.shape, device=t.device).to(t.dtype)
        return t.clone()

    return tuple(whole(a) for a in sample.args), {k: whole(v) for k, v in sample.kwargs.items()}


def _time_model(
    model: nn.Module,
    norms: Sequence[_Norm],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: _Options,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The whole model before and after: classes change between rounds."""
    if options.rounds == 0:
        return {}
    progress("timing the model")
    plans = [(n.module, n.base, type(n.module)) for n in norms]

    def one(new: bool, gradients: bool) -> Callable[[], Any]:
        def call() -> Any:
            for module, base, swapped in plans:
                module.__class__ = swapped if new else base
            return proof.step(model, args, kwargs, gradients=gradients)

        return call

    speeds: dict[str, Any] = {}
    device = next((p.device for p in model.parameters()), None)
    learns = options.gradients and any(p.requires_grad for p in model.parameters())
    with restored(), proof.same_attributes(model), proof.same_buffers(model):
        for name, gradients in (("speed", False), ("backward_speed", True))[: 1 + learns]:
            seconds = timing.interleave([one(False, gradients), one(True, gradients)], options.rounds, device)
            speeds[name] = timing.speed(seconds)
    for module, _, swapped in plans:
        module.__class__ = swapped
    return speeds


# ---- the whole model ----


def _give(norms: Sequence[_Norm]) -> None:
    done: list[_Norm] = []
    try:
        for norm in norms:
            norm.module.__class__ = swapped_class(norm.base, norm.plan)
            done.append(norm)
    except TypeError as error:
        for norm in done:
            give_back(norm.module)
        raise ConversionError(f"the class of {norms[len(done)].record.name} cannot be changed: {error}") from error


def _compare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: _Options,
    before: proof.Run,
    exact: proof.Run | None,
) -> Errors:
    after = proof.run(model, args, kwargs, gradients=options.gradients)
    off = proof.difference(after, before)
    nothing = Difference()
    near, noise = (nothing, nothing) if exact is None else (proof.difference(r, exact) for r in (after, before))
    proof.check(off, proof.limits(proof.main_dtype(model), noise, options.strict), "the swap")
    return Errors(original=off, exact=near, noise=noise)


def _float64_run(
    model: nn.Module,
    norms: Sequence[_Norm],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: _Options,
    random: bool,
    notes: list[str],
    progress: Callable[[str], None],
) -> proof.Run | None:
    """The model in float64, its norms by their definition; None where that cannot be had, with a note."""
    size = 8 * sum(t.numel() for _, t, _, _ in tensors_of(model) if t.is_floating_point())
    if options.float64 is False or (options.float64 is None and size > _FLOAT64_BYTES):
        notes.append(f"not compared with float64: a copy would take {size / 2**30:.1f} GiB (float64=True to have it)")
        return None
    if random:
        notes.append("not compared with float64: the run draws random numbers, and other dtypes draw others")
        return None
    progress("running the model in float64")
    try:
        exact = proof.exact_copy(model)
        parts = dict(exact.named_modules())
        names = {id(m): n for n, m in model.named_modules()}
        for norm in norms:
            part = parts[names[id(norm.module)]]
            part.forward = _exact_forward(norm, part)
        with restored():
            torch.set_default_dtype(torch.float64)
            return proof.run(exact, proof.in_float64(args), proof.in_float64(kwargs), gradients=options.gradients)
    except (NotANorm, RuntimeError, TypeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        notes.append(f"not compared with float64: the model does not run in it ({type(error).__name__}: {first[:120]})")
        return None


def _exact_forward(norm: _Norm, part: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        picked = norm.plan.arguments.pick(args, kwargs)
        own = part.training and norm.plan.stateful  # it would have to move its running statistics as well
        if own or picked is None or (picked[1] is None) != (norm.plan.spec.gate is None):
            return norm.base.forward(part, *args, **kwargs)
        return norm.plan.exact(part, *picked)

    return forward


def _undo(norms: Sequence[_Norm]) -> Callable[[], None]:
    """Gives every module its class back, or none."""
    changed = [(n.record.name, n.module, n.base, type(n.module)) for n in norms]

    def undo() -> None:
        for name, module, base, swapped in changed:
            if type(module) not in (base, swapped):
                raise ConversionError(
                    f"{name} was given another class since it was swapped, {type(module).__name__} "
                    f"({_origin(module)}), which stands on the swapped one: undo that first, or undo before it"
                )
        for _, module, base, swapped in changed:
            if type(module) is swapped:
                module.__class__ = base

    return undo


def _origin(module: nn.Module) -> str:
    above = [c.__name__ for c in type(module).__mro__[1:] if plan_of_class(c)]
    mixed = [c.__name__ for c in type(module).__bases__ if c.__name__ not in above]
    return f"by {', '.join(mixed)}" if mixed else "by something that subclasses it"


def plan_of_class(cls: type) -> bool:
    """Whether a class is a swapped one."""
    return "__normkit_plan__" in vars(cls)


__all__ = ["SwapReceipt", "base_of", "ops", "swap"]
