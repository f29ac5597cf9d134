"""What every provider gives: something to call and time, and how to read what it returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.bench.grid import Case, Inputs


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


class Step(NamedTuple):
    """One provider on one case.

    The outputs are the result, with a residual the sum, and in training the gradients of `Case.leaves`, in this order.
    """

    call: Callable[[], Any]
    """What is timed."""
    outputs: Callable[[Any], tuple[Tensor, ...]] = _as_tuple
    """Of what a call returned, in x's shape."""


def as_array(case: Case, t: Tensor) -> Tensor:
    """A tensor for those who have row-major arrays only: channels-last memory is one of (N, H, W, C)."""
    return t.detach().permute(0, 2, 3, 1) if case.channels_last and t.dim() == 4 else t.detach()


def as_image(case: Case, t: Tensor) -> Tensor:
    """An array of theirs in x's shape again."""
    return t.permute(0, 3, 1, 2) if case.channels_last and t.dim() == 4 else t


def activations(case: Case, i: Inputs) -> dict[str, Tensor]:
    """The inputs of a graph that holds the parameters as constants: x, or what it is a slice of, and the other one."""
    given = {"x": i.packed, "other": i.other}
    return {name: as_array(case, t) for name, t in given.items() if name in case.arguments}


def torch_step(case: Case, inputs: Inputs, function: Callable[..., Any]) -> Step:
    """A step of a function of tensors, by torch's autograd in training."""
    args = inputs.of(case)
    if case.mode != "train":
        return Step(lambda: function(*args))
    leaves = [getattr(inputs, name) for name in case.leaves]
    grads = inputs.grads(case)

    def train() -> tuple[Tensor, ...]:
        result = function(*args)
        results = (result,) if isinstance(result, Tensor) else result
        return (*results, *torch.autograd.grad(results, leaves, grads))

    return Step(train)
