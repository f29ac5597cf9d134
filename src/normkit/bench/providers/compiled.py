"""torch.compile of what model code spells out, or of torch's function where model code calls that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.bench.grid import Case, Inputs
from normkit.bench.providers.eager import MODEL_CODE, TORCH, targets_of
from normkit.bench.providers.step import Step, torch_step


def make(case: Case, inputs: Inputs) -> Step:
    """One graph, static shapes, code for the case's number of threads; a preallocated case's code writes there."""
    form = MODEL_CODE.get(case.norm, TORCH[case.norm])
    torch._dynamo.reset()
    options: dict[str, Any] = {"cpp.threads": case.threads}
    if case.mode != "preallocated":
        return torch_step(case, inputs, torch.compile(form, fullgraph=True, dynamic=False, options=options))
    args, targets = inputs.of(case), tuple(targets_of(case, inputs).values())

    def into(targets: tuple[Tensor, ...], *args: Tensor) -> None:
        result = form(*args)
        for target, value in zip(targets, (result,) if isinstance(result, Tensor) else result, strict=True):
            target.copy_(value)  # the compiled code stores there directly

    function = torch.compile(into, fullgraph=True, dynamic=False, options=options)
    return Step(lambda: function(targets, *args), lambda _: targets)
