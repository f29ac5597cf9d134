"""Residual sums fused into the swapped norms behind them: which blocks, the proof, their classes.

A block that calls one of its own norms on a sum is given a subclass whose forward is its own but for that (see
`rewrite`). What stands there (`add_norm`) looks at each call, and adds and calls the norm as the block did wherever
hooks, another class, a mode or an operand is not what was proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from normkit.audit.identify.probe import restored
from normkit.convert import proof, timing
from normkit.convert.receipt import Change, ConversionError, Difference, Errors, Refusal, deviations, worst
from normkit.convert.swap.norm import Norm, Options
from normkit.convert.swap.probe import LIMITS
from normkit.convert.swap.reclass import adder_of, subclass, unfit
from normkit.convert.swap.rewrite import Unreadable, rewrite
from normkit.convert.swap.whole import compare_model, take_back
from normkit.errors import message

_ROUNDS = 12
_CALL = nn.Module.__call__
_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
_compiling = torch.compiler.is_compiling


def add_norm(a: Any, b: Any, norm: Any) -> tuple[Any, Any]:
    """(``norm(a + b)``, ``a + b``), by one operator where nothing would see the difference."""
    both = fused(a, b, norm)
    if both is not None:
        return both
    return _apart(a, b, norm)


def _apart(a: Any, b: Any, norm: Any) -> tuple[Any, Any]:
    total = a + b
    return norm(total), total


def fused(a: Any, b: Any, norm: Any) -> tuple[Tensor, Tensor] | None:
    """Both by one operator; None where the block's own way must be taken."""
    if type(a) is not Tensor or type(b) is not Tensor or a.shape != b.shape or a.dtype != b.dtype:
        return None
    add = adder_of(norm)
    return None if add is None or _watched(norm) else add(norm, a, b)


def _watched(norm: nn.Module) -> bool:
    """Whether a call of the norm does more than its forward, or a sum is seen by others."""
    if "forward" in norm.__dict__ or norm._forward_hooks or norm._forward_pre_hooks:
        return True
    if norm._backward_hooks or norm._backward_pre_hooks or norm._compiled_call_impl is not None:
        return True
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        return True
    return not _compiling() and (nn.Module.__call__ is not _CALL or torch._C._len_torch_function_stack() > 0)


def fused_class(base: type[nn.Module], norms: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of a block's class with fused sums before some of its norms; the class itself without source."""
    key = (base, norms)
    if key not in _CLASSES:
        try:
            forward, _ = rewrite(base.forward, norms, add_norm)
        except Unreadable:
            return base
        _CLASSES[key] = subclass(base, {"forward": forward}, fused_class, norms, silent=True)
    return _CLASSES[key]


@dataclass
class Site:
    """One norm of a block that its forward calls on a sum."""

    name: str
    """The norm's name in the model."""
    attribute: str
    norm: Norm
    found: list[Difference] = field(default_factory=list)
    reason: str = ""
    """Why it is not fused, if it is not."""
    change: dict[str, Any] = field(default_factory=dict)


@dataclass
class Block:
    """One module that is given a forward with fused sums."""

    name: str
    module: nn.Module
    base: type[nn.Module]
    sites: list[Site]

    @property
    def attributes(self) -> tuple[str, ...]:
        """Those of its norms that are fused."""
        return tuple(sorted({s.attribute for s in self.sites if not s.reason}))


def fuse(
    model: nn.Module,
    norms: Sequence[Norm],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    before: proof.Run,
    exact: proof.Run | None,
) -> tuple[list[Block], tuple[Refusal, ...], Errors | None]:
    """Fuse what is proven: (the blocks, the norms that are not fused and why, the model's errors with it).

    Raises:
        ConversionError: the model is farther off than allowed; no block is changed then.
    """
    others: dict[str, str] = {}
    blocks = _find(model, norms, others)
    _prove(model, blocks, args, kwargs, options)
    wanted = [b for b in blocks if b.attributes]
    errors = None
    if wanted:
        _give(wanted)
        try:
            errors = compare_model(model, norms, args, kwargs, options, before, exact)
        except BaseException as error:
            take_back(wanted)
            if isinstance(error, ConversionError) or not isinstance(error, Exception):
                raise
            for site in (s for b in wanted for s in b.sites):
                site.reason = site.reason or f"with sums fused the model raises: {message(error)}"
            wanted = []
    return wanted, _refusals(blocks, others), errors


def _find(model: nn.Module, norms: Sequence[Norm], refused: dict[str, str]) -> list[Block]:
    """The modules that call a norm of their own on a sum; the reasons of all other norms go into ``refused``."""
    known = {id(n.module): n for n in norms}
    refused.update({n.name: "no module owns it" for n in norms})
    blocks = []
    for name, module in model.named_modules():
        own = {a: known[id(m)] for a, m in module._modules.items() if id(m) in known}
        if not own:
            continue
        try:
            reason = unfit(module, silent=True)
            if reason:
                raise Unreadable(f"its block {name or type(module).__name__}: {reason}")
            _, places = rewrite(type(module).forward, own.keys(), add_norm)
        except Unreadable as error:
            refused.update({n.name: str(error) for n in own.values()})
            continue
        for attribute in own.keys() - set(places):
            refused[own[attribute].name] = f"the forward of {name or 'the model'} does not call it on a sum made there"
        sites = [Site(own[a].name, a, own[a]) for a in sorted(set(places))]
        if sites:
            blocks.append(Block(name, module, type(module), sites))
    return blocks


def _prove(
    model: nn.Module, blocks: Sequence[Block], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> None:
    """Run the model, and each sum and its norm both ways where they are met; sites get reasons, errors and speeds."""
    timed: dict[Any, dict[str, Any] | str] = {}
    for block in blocks:
        by_module = {id(s.norm.module): s for s in block.sites}

        def look(a: Any, b: Any, norm: Any, sites: dict[int, Site] = by_module) -> tuple[Any, Any]:
            site = sites.get(id(norm))
            if site is not None and not site.reason and not site.found:
                with restored(), torch.enable_grad():
                    site.reason = _prove_site(site, a, b) or _time_site(site, a, b, options, timed)
            return _apart(a, b, norm)

        forward, _ = rewrite(block.base.forward, {s.attribute for s in block.sites}, look)
        block.module.__class__ = subclass(block.base, {"forward": forward}, fused_class, (), silent=True)
    try:
        proof.run(model, args, kwargs, gradients=False)
    finally:
        take_back(blocks)
    for site in (s for b in blocks for s in b.sites):
        if not site.found and not site.reason:
            site.reason = "its sum was not reached in the model's run"


def _copies(a: Tensor, b: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Both operands for a run of their own, and what gets gradients in it."""
    x, z = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    return x, z, [x, z, *(p for p in norm.parameters() if p.is_floating_point() and p.requires_grad)]


def _prove_site(site: Site, a: Any, b: Any) -> str:
    """The outputs must have the same bits, and the gradients be as near as a norm's: why not, or nothing."""
    norm = site.norm.module
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return "its sum is not one of two tensors of one shape and dtype"
    if _watched(norm):
        return "something watches it: a hook, a wrapper or a torch function mode"
    results = []
    for run in (fused, _apart):
        x, z, leaves = _copies(a, b, norm)
        with torch.no_grad():
            plain = run(x, z, norm)
        recorded = run(x, z, norm)
        if plain is None or recorded is None:
            return "no operator adds and normalizes it"
        seeds = [proof.direction(recorded[0]), proof.direction(recorded[1].flip(0)).flip(0)]
        results.append(([*plain, *recorded], list(torch.autograd.grad(recorded, leaves, seeds, allow_unused=True))))
    (new, new_gradients), (old, old_gradients) = results
    off = Difference(outputs=deviations(new, old), gradients=deviations(new_gradients, old_gradients))
    site.found.append(off)
    if off.outputs != 0 or any(n.dtype != o.dtype or n.stride() != o.stride() for n, o in zip(new, old, strict=True)):
        return f"the fused sum or its norm would have other bits: off by {off.outputs:.1e} of the largest"
    limit = 2 * LIMITS[a.dtype]  # two roundings of one exact gradient, each within the limit
    if off.gradients is not None and not off.gradients <= limit:
        return f"its gradients would be off by {off.gradients:.1e} of their largest"
    return ""


def _time_site(site: Site, a: Tensor, b: Tensor, options: Options, timed: dict[Any, dict[str, Any] | str]) -> str:
    """Sum and norm against both in one, each distinct case once: why not, or nothing."""
    if not options.only_faster:
        return ""
    key = (type(site.norm.module), a.shape, a.dtype, site.norm.module.training)
    if key not in timed:
        timed[key] = _timings(site.norm.module, a, b)
    found = timed[key]
    if isinstance(found, str):
        return found
    site.change = found
    return ""


def _timings(norm: nn.Module, a: Tensor, b: Tensor) -> dict[str, Any] | str:
    x, z, leaves = _copies(a, b, norm)
    seeds = [torch.ones_like(x), torch.ones_like(x)]

    def infer(run: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return run(x, z, norm)

        return call

    def learn(run: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(run(x, z, norm), leaves, seeds, allow_unused=True)

    inference = timing.interleave([infer(r) for r in (_apart, add_norm)], _ROUNDS, x.device)
    training = timing.interleave([learn(r) for r in (_apart, add_norm)], _ROUNDS, x.device)
    speed, backward = timing.speed(inference), timing.speed(training)
    if timing.is_slower(inference) or timing.is_slower(training):
        return f"in one call they would be slower here: {speed.ratio:.2f}x, with backward {backward.ratio:.2f}x"
    return {"speed": speed, "backward_speed": backward}


def _give(blocks: Sequence[Block]) -> None:
    """Every block its class with fused sums."""
    for block in blocks:
        block.module.__class__ = fused_class(block.base, block.attributes)


def changes(blocks: Sequence[Block]) -> tuple[Change, ...]:
    """One for each block, with what was measured of its sums."""
    made = []
    for block in blocks:
        sites = [s for s in block.sites if not s.reason]
        what = "sum fused into " + ", ".join(s.attribute for s in sites)
        errors = Errors(original=worst([d for s in sites for d in s.found]))
        made.append(Change(name=block.name, what=what, errors=errors, **sites[0].change))
    return tuple(made)


def _refusals(blocks: Sequence[Block], others: dict[str, str]) -> tuple[Refusal, ...]:
    """(norm, reason) of those that are not fused."""
    sites = {s.name: s.reason for b in blocks for s in b.sites}
    done = {name for name, reason in sites.items() if not reason}
    reasons = {**others, **{n: r for n, r in sites.items() if r}}
    return tuple(Refusal(name, reason) for name, reason in reasons.items() if name not in done)
