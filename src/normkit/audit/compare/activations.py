"""Running two models on the same inputs, and how far apart their norms' inputs and outputs are."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from normkit.audit.numbers.sites import NormSites
from normkit.audit.trace import trace
from normkit.audit.trace.watch import Watch
from normkit.errors import described

Capture = dict[tuple[str, int, str], Tensor]
"""(norm, call, ``"input"`` or ``"output"``) to its value, and (``""``, 0, ``"output"``) to the model's output."""


class RunError(Exception):
    """A model does not run on the inputs; the message says which and why."""


def capture(model: nn.Module, sites: Sequence[NormSites], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture:
    """Every norm's inputs and outputs in one run, copied to the CPU.

    Raises:
        RunError: the model raised.
    """
    found: Capture = {}

    def keep(key: tuple[str, int, str], value: Tensor) -> None:
        found[key] = value.detach().cpu().clone()

    watch = Watch()
    for norm in sites:
        for call, (given, made) in enumerate(norm.calls):
            if given is not None:
                watch.value(given, partial(keep, (norm.name, call, "input")))
            if made is not None:
                watch.value(made, partial(keep, (norm.name, call, "output")))
    outputs: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, __, output: outputs.extend(_tensors(output)[:1]))
    try:
        recorded = trace(model, args, dict(kwargs), watch)
    finally:
        hook.remove()
    if recorded.error is not None:
        raise RunError(f"{type(model).__name__} raised {described(recorded.error)}")
    if outputs:
        found["", 0, "output"] = outputs[0].detach().cpu().clone()
    return found


def _tensors(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself if all its floats are of a dtype, else a copy that is."""
    floats = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    return model if floats <= {dtype} else copy.deepcopy(model).to(dtype)


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Inputs with their floating-point tensors in a dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def relative_error(a: Tensor, b: Tensor) -> float | None:
    """``||a - b|| / ||a||``, with dims merged, split or swapped where the shapes differ; None where that is no help.

    Where several orders of the dims of b fit, the one nearest to a is meant.
    """
    if a.numel() != b.numel():
        return None
    if a.shape == b.shape:
        return _error(a, b)
    tries = [b.reshape(a.shape)]
    if b.dim() <= 5:
        tries += [b.permute(p).reshape(a.shape) for p in itertools.permutations(range(b.dim()))]
    return min(_error(a, t) for t in tries)


def _error(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    agree = (a == b) | (a.isnan() & b.isnan())  # infinities of masks, and NaN in both
    gap = torch.where(agree, 0.0, a - b)
    size = torch.where(a.isfinite(), a, 0.0).norm().item()
    error = gap.norm().item()
    if error == 0:
        return 0.0
    return error / size if size and not math.isnan(error) else math.inf
