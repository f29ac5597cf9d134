"""The whole model: its norms given other classes, its run before and after, the way back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.identify.probe import NotANorm, restored, tensors_of
from normkit.convert import proof
from normkit.convert.receipt import ConversionError, Difference, Errors, Refusal
from normkit.convert.swap.norm import Norm, Options, Reclassed
from normkit.convert.swap.plan import HALF
from normkit.convert.swap.reclass import swapped_class
from normkit.errors import message

_FLOAT64_BYTES = 2**31


def give(norms: Sequence[Norm]) -> None:
    """Every norm its swapped class, or none."""
    for norm in norms:
        try:
            norm.module.__class__ = swapped_class(norm.base, norm.plan)
        except TypeError as error:
            take_back(norms)
            raise ConversionError(f"the class of {norm.name} cannot be changed: {error}") from error


def take_back(changed: Sequence[Reclassed]) -> None:
    """Every module its own class."""
    for one in changed:
        if type(one.module) is not one.base:
            one.module.__class__ = one.base


def settle(
    model: nn.Module,
    norms: list[Norm],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    before: proof.Run,
    exact: proof.Run | None,
    refused: list[Refusal],
) -> tuple[list[Norm], Errors]:
    """Give the norms their swapped classes and compare the model; those with which alone it raises are left.

    (A kernel keeps its input for the backward where some norms keep a copy in float32: a model that writes into that
    input afterwards can then not be differentiated.)
    """
    give(norms)
    try:
        return norms, compare_model(model, norms, args, kwargs, options, before, exact)
    except ConversionError:
        raise
    except Exception as error:  # foreign code around a swapped norm
        failure = error
    take_back(norms)
    kept = []
    for norm in norms:
        give([norm])
        try:
            proof.run(model, args, kwargs, gradients=options.gradients)
            kept.append(norm)
        except Exception as error:
            refused.append(Refusal(norm.record.name, f"with it swapped the model raises: {message(error)}"))
        finally:
            take_back([norm])
    if len(kept) == len(norms):
        raise ConversionError(f"the swap is undone: the model raises with it: {message(failure)}") from failure
    give(kept)
    if not kept:
        return kept, Errors(original=Difference())
    return kept, compare_model(model, kept, args, kwargs, options, before, exact)


def compare_model(
    model: nn.Module,
    norms: Sequence[Norm],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    before: proof.Run,
    exact: proof.Run | None,
) -> Errors:
    """Run the swapped model and measure; ConversionError where it is farther off than allowed."""
    after = proof.run(model, args, kwargs, gradients=options.gradients)
    off, dtype = proof.difference(after, before), proof.main_dtype(model)
    near = noise = Difference()
    if exact is not None:
        near, noise = proof.difference(after, exact), proof.difference(before, exact)
    allowed = noise
    if exact is None and dtype in HALF and options.strict is None:
        with _shaken(norms):
            allowed = proof.difference(proof.run(model, args, kwargs, gradients=options.gradients), after)
    least = proof.limits(dtype, Difference(), options.strict)
    if proof.exceeding(off, least):
        again = proof.difference(proof.run(model, args, kwargs, gradients=options.gradients), after)
        if proof.exceeding(again, least):  # other numbers each time are no rounding noise
            allowed = Difference()
    proof.check(off, proof.limits(dtype, allowed, options.strict), "the swap")
    return Errors(original=off, exact=near, noise=noise)


@contextlib.contextmanager
def _shaken(norms: Sequence[Norm]) -> Generator[None]:
    """Each norm's outputs moved by a unit in the last place at random: the noise of a model that has no wide copy."""
    generator = torch.Generator().manual_seed(20240229)

    def shake(_: nn.Module, __: Any, y: Any) -> Any:
        if not isinstance(y, Tensor) or y.dtype not in HALF:
            return y
        steps = torch.randint(-1, 2, y.shape, generator=generator).to(y.device, y.dtype)
        return y + y.detach() * steps * torch.finfo(y.dtype).eps

    handles = [n.module.register_forward_hook(shake) for n in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def wide_run(
    model: nn.Module,
    norms: Sequence[Norm],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
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
    wide = [torch.float64, torch.float32] if proof.main_dtype(model) in HALF else [torch.float64]
    reason = ""
    for dtype in wide:
        progress(f"running the model in {str(dtype).removeprefix('torch.')}")
        try:
            found = _run_in(model, norms, args, kwargs, options, dtype)
        except (NotANorm, RuntimeError, TypeError, ValueError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            reason = f"the model does not run in it ({type(error).__name__}: {first[:120]})"
            continue
        if dtype == torch.float32:
            notes.append(f"compared with float32 instead of float64: {reason}")
        return found
    notes.append(f"not compared with float64: {reason}")
    return None


def _run_in(
    model: nn.Module,
    norms: Sequence[Norm],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    dtype: torch.dtype,
) -> proof.Run:
    wide = proof.wide_copy(model, dtype)
    parts = dict(wide.named_modules())
    names = {id(m): n for n, m in model.named_modules()}
    for norm in norms:
        part = parts[names[id(norm.module)]]
        part.forward = _exact_forward(norm, part, dtype)
    with restored():
        torch.set_default_dtype(dtype)
        return proof.run(wide, proof.cast(args, dtype), proof.cast(kwargs, dtype), gradients=options.gradients)


def _exact_forward(norm: Norm, part: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        picked = norm.plan.arguments.pick(args, kwargs)
        own = part.training and norm.plan.stateful  # it would have to move its running statistics as well
        if own or picked is None or (picked[1] is None) != (norm.plan.spec.gate is None):
            return norm.base.forward(part, *args, **kwargs)
        return norm.plan.exact(part, *picked).to(dtype)

    return forward


def undo_of(norms: Sequence[Reclassed]) -> Callable[[], None]:
    """Gives every module its class back, or none."""
    changed = [(n.name, n.module, n.base, type(n.module)) for n in norms]

    def undo() -> None:
        for name, module, base, swapped in changed:
            if type(module) not in (base, swapped):
                raise ConversionError(
                    f"{name} was given another class since it was swapped, {type(module).__name__} of "
                    f"{', '.join(c.__name__ for c in type(module).__bases__)}, which stands on the swapped one "
                    "(fully_shard does this): it can only be undone before that"
                )
        for _, module, base, swapped in changed:
            if type(module) is swapped:
                module.__class__ = base

    return undo
