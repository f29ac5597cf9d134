"""swap: find the norms, prove each one on its own inputs, change their classes, prove the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit import AuditError, NormRecord, audit
from normkit.audit.identify.probe import tensors_of
from normkit.audit.inputs import InputError, guess_inputs
from normkit.audit.report import describe
from normkit.convert import proof
from normkit.convert.receipt import Change, ConversionError, Receipt, Refusal
from normkit.convert.swap import fuse
from normkit.convert.swap.norm import Norm, Options
from normkit.convert.swap.plan import Plan, arguments_of, constants_of, has_operator
from normkit.convert.swap.probe import Regimes, prove, sample_of
from normkit.convert.swap.reclass import plan_of, unfit
from normkit.convert.swap.speed import time_model, time_norm
from normkit.convert.swap.whole import settle, take_back, undo_of, wide_run
from normkit.errors import message
from normkit.spec import NormSpec


@dataclass(kw_only=True)
class SwapReceipt(Receipt):
    """A `Receipt` with the names that a swap has for its parts."""

    conversion: str = "swap"
    fused: tuple[Change, ...] = ()
    """The blocks whose residual sums are fused into the norms behind them, with the speed of one such pair."""
    unfused: tuple[Refusal, ...] = ()
    """(name, reason) of the swapped norms that are not called on a fused sum, where that was asked for."""

    @property
    def swapped(self) -> tuple[str, ...]:
        """The names of the norms that run on normkit now."""
        return tuple(c.name for c in self.changed)

    @property
    def skipped(self) -> tuple[Refusal, ...]:
        """(name, reason) of those that do not."""
        return self.refused

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; see `Receipt.to_dict`."""
        fused = {"fused": [c.to_dict() for c in self.fused], "unfused": [r._asdict() for r in self.unfused]}
        return super().to_dict() | fused


def swap(
    model: nn.Module,
    *example_args: Any,
    strict: float | None = None,
    only_faster: bool = True,
    same_rounding: bool = False,
    fuse_residual: bool = False,
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
        same_rounding: leave norms alone, in half precision, that round at every step, or channel statistics where
            torch's kernels do: ours round once, which is nearer to float64 and has other bits.
        fuse_residual: also give the blocks that call one of these norms on a sum, ``s = a + b; y = norm(s)``, a class
            whose forward makes both in one call. Wherever that would show (a hook on the norm, another shape, a
            transform), the two are made as before.
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
    options = Options(strict, only_faster, same_rounding, gradients, float64, rounds, fuse_residual)
    with torch.compiler.set_stance("force_eager"):
        return _swap(model, example_args, example_kwargs, options, progress)


def _check(model: object, strict: float | None, rounds: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if strict is not None and (isinstance(strict, bool) or not isinstance(strict, int | float) or not strict >= 0):
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
    options: Options,
    progress: Callable[[str], None],
) -> SwapReceipt:
    try:
        found = audit(model, *args, progress=progress, **kwargs)
    except AuditError as error:
        raise ConversionError(str(error)) from error
    refused: list[Refusal] = []
    norms: list[Norm] = []
    before: proof.Run | None = None
    for record in found.norms:
        norm = _planned(record, options)
        if isinstance(norm, str):
            refused.append(Refusal(record.name, norm))
        else:
            norms.append(norm)
    if norms:
        progress("running the model before")
        with _recording(norms):
            before = _first_run(model, args, kwargs, options)
        norms = _proven(norms, options, refused, progress)
    order = {r.name: i for i, r in enumerate(found.norms)}
    refused.sort(key=lambda r: order[r.name])
    if not norms or before is None:
        return SwapReceipt(model=type(model).__name__, refused=tuple(refused), revert=lambda: None)
    notes: list[str] = []
    exact = wide_run(model, norms, args, kwargs, options, before.random, notes, progress)
    progress("running the model after")
    wanted = norms
    blocks: list[fuse.Block] = []
    unfused: tuple[Refusal, ...] = ()
    try:
        norms, errors = settle(model, wanted, args, kwargs, options, before, exact, refused)
        refused.sort(key=lambda r: order[r.name])
        if not norms:
            return SwapReceipt(model=type(model).__name__, refused=tuple(refused), revert=lambda: None)
        if options.fuse_residual:
            progress("fusing residual sums")
            blocks, unfused, after = fuse.fuse(model, norms, args, kwargs, options, before, exact)
            errors = after or errors
        speeds = time_model(model, [*norms, *blocks], args, kwargs, options, progress)
    except BaseException:
        take_back([*wanted, *blocks])
        raise
    changed = tuple(Change(name=n.record.name, what=_what(n), errors=n.errors, **n.change) for n in norms)
    return SwapReceipt(
        model=type(model).__name__,
        changed=changed,
        refused=tuple(refused),
        errors=errors,
        notes=tuple(notes),
        revert=undo_of([*norms, *blocks]),
        fused=fuse.changes(blocks),
        unfused=unfused,
        **speeds,
    )


def _first_run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> proof.Run:
    try:
        return proof.run(model, args, kwargs, gradients=options.gradients)
    except Exception as error:  # foreign code
        said = f"{type(model).__name__} could not be run to prove a swap on: {message(error)}"
        if options.gradients:
            with contextlib.suppress(Exception):
                proof.run(model, args, kwargs, gradients=False)
                said = f"{said}; it runs without gradients: gradients=False proves outputs alone"
        raise ConversionError(said) from error


def _what(norm: Norm) -> str:
    text = describe.what(norm.record)
    if norm.flips:
        text += ", rounded once"
    if norm.plan.inference != norm.plan.gradient:
        text += ", where a gradient is recorded" if norm.plan.gradient else ", where no gradient is recorded"
    return text


# ---- which norms, and how ----


def _planned(record: NormRecord, options: Options) -> Norm | str:
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
    plan = Plan(
        spec,
        kernel,
        arguments,
        weight=identified.weight,
        bias=identified.bias,
        running_mean=identified.running_mean,
        running_var=identified.running_var,
        constants=constants_of(module),
        literal=literal,
    )
    return Norm(record, module, plan, type(module))


def _unfit(module: nn.Module) -> str:
    """What stands in the way of a norm's swap."""
    reason = unfit(module)
    if reason:
        return reason
    if isinstance(module, nn.SyncBatchNorm):  # what it shares with other processes, no run of one of them shows
        return "it shares its statistics between processes"
    for name, child in module.named_modules():
        if child is module:
            continue
        if any(True for _ in tensors_of(child)) or child._forward_hooks or child._forward_pre_hooks:
            return f"it calls {name}, a module with tensors or hooks of its own"
    return ""


@contextlib.contextmanager
def _recording(norms: Sequence[Norm]) -> Generator[None]:
    """Keep what each norm is first called with."""
    handles = []
    for norm in norms:

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], norm: Norm = norm) -> None:
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
    norms: Sequence[Norm], options: Options, refused: list[Refusal], progress: Callable[[str], None]
) -> list[Norm]:
    """Those that match, and are no slower."""
    known: Regimes = {}
    timed: dict[Any, dict[str, Any] | str] = {}
    kept = []
    for norm in norms:
        progress(f"probing {norm.record.name}")
        reason = _prove_one(norm, options, known) or time_norm(norm, options, timed)
        if reason:
            refused.append(Refusal(norm.record.name, reason))
        else:
            kept.append(norm)
    return kept


def _prove_one(norm: Norm, options: Options, known: Regimes) -> str:
    if norm.sample is None:
        return "it is called with more than an input and a gate"
    plan, found = prove(norm.plan, norm.module, norm.sample, known, same_rounding=options.same_rounding)
    norm.errors, norm.flips = found.errors, found.flips
    if plan is not None:
        norm.plan = plan
    return found.reason
