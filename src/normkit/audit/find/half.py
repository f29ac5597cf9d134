"""How a norm written inline rounds half precision.

A float32 run does not show it, since casts to float32 do nothing there. The module that holds the norm runs once more,
alone, on the meta device and in bfloat16; its casts are then in the trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normkit.audit.find.operators import FUSED, STATISTIC, packet, sums_by_product
from normkit.audit.identify.probe import NotANorm, private_copy
from normkit.audit.trace import trace
from normkit.audit.trace.graph import ModuleCall, Opaque, TensorInfo, Trace

HALF = (torch.bfloat16, torch.float16)


def in_half(call: ModuleCall) -> Trace | None:
    """The trace of a module called as recorded, in bfloat16 on meta; None where it cannot be run so."""
    try:
        twin = private_copy(call.module, _on_meta)
    except NotANorm:
        return None
    for part, original in zip(twin.modules(), call.module.modules(), strict=False):
        part.training = original.training
    args, kwargs = tree_map_only(TensorInfo, _stand_in, (call.args, call.kwargs))
    args, kwargs = tree_map_only(Opaque, lambda _: None, (args, kwargs))
    found = trace(twin, args, kwargs)
    return found if found.nodes else None


def counterpart(full: Trace, lead: int, half: Trace) -> int | None:
    """The node of a half-precision trace of a call that is what a lead is in the whole trace; None if runs differ."""
    owner = full.nodes[lead].call
    ours, theirs = _leads(full, owner), _leads(half, 0)
    place = ours.index(lead) if lead in ours else -1
    if place < 0 or len(theirs) <= place or packet(half.nodes[theirs[place]]) != packet(full.nodes[lead]):
        return None
    return theirs[place]


def _leads(recorded: Trace, call: int) -> list[int]:
    kinds, products = STATISTIC | FUSED, sums_by_product(recorded)
    own = (n for n in recorded.calls[call].nodes if recorded.nodes[n].call == call)
    return [n for n in own if n in products or packet(recorded.nodes[n]) in kinds]


def _on_meta(tensor: Tensor) -> Tensor:
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    made = torch.empty(tuple(tensor.shape), dtype=dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _stand_in(info: TensorInfo) -> Any:
    dtype = torch.bfloat16 if info.dtype.is_floating_point else info.dtype
    return torch.empty_strided(info.shape, info.stride, dtype=dtype, device="meta")
