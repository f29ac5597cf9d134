"""Old against new: each norm at the shape that it had, and the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.identify.probe import restored
from normkit.audit.trace.recorder import same_attributes
from normkit.convert import proof, timing
from normkit.convert.swap.norm import Norm, Options, Reclassed
from normkit.convert.swap.probe import Sample, twin
from normkit.convert.swap.reclass import swapped_class

_ROUNDS = 12


def time_norm(norm: Norm, options: Options, timed: dict[Any, dict[str, Any] | str]) -> str:
    """Old against new at the shape that the norm had; each distinct case once. Why not, or nothing."""
    if not options.only_faster:
        return ""
    sample = norm.sample
    assert sample is not None
    unlike = norm.plan.replace(constants=())
    key = (norm.base, unlike, sample.shape, sample.stride, sample.dtype, sample.device, norm.module.training)
    if key not in timed:
        timed[key] = _timings(norm, sample)
    found = timed[key]
    if isinstance(found, str):
        return found
    norm.change = {k: v for k, v in found.items() if k in ("speed", "backward_speed")}
    norm.plan = norm.plan.replace(inference=found["inference"], gradient=found["gradient"])
    return ""


def _timings(norm: Norm, sample: Sample) -> dict[str, Any] | str:
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


def _full(norm: Norm, sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def time_model(
    model: nn.Module,
    norms: Sequence[Reclassed],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
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
    with restored(), same_attributes(model), proof.same_buffers(model):
        for name, gradients in (("speed", False), ("backward_speed", True))[: 1 + learns]:
            seconds = timing.interleave([one(False, gradients), one(True, gradients)], options.rounds, device)
            speeds[name] = timing.speed(seconds)
    for module, _, swapped in plans:
        module.__class__ = swapped
    return speeds
