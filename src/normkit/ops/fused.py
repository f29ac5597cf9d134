"""torch's own fused operators, for devices without a kernel of ours and for CPUs without the extension.

Each function answers None where torch would not compute the same thing; the plain form runs then. On the CPU torch's
channel norms are left out: they lose digits for a large mean in channels-last memory, and the plain form does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.ops.autograd import transforms_active

_HALF = (torch.float16, torch.bfloat16)


def _alike(x: Tensor, *parameters: Tensor | None) -> bool:
    plain = x.is_floating_point() and not transforms_active() and type(x) in (Tensor, torch.nn.Parameter)
    return plain and all(
        p is None or (p.dtype == x.dtype and p.device == x.device and p.dim() == 1) for p in parameters
    )


def row_norm(
    centered: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_gain: bool,
    dtype: torch.dtype | None,
) -> Tensor | None:
    """LayerNorm or RMSNorm over the last dim by torch's kernel: float32 inside, rounded once."""
    rounds = round_before_gain and x.dtype in _HALF and weight is not None
    if rounds or weight_offset != 0 or dtype not in (None, x.dtype) or x.dim() < 1 or not _alike(x, weight, bias):
        return None
    shape = x.shape[-1:]
    if any(p is not None and p.shape != shape for p in (weight, bias)):
        return None
    if centered:
        return F.layer_norm(x, shape, weight, bias, eps)
    return F.rms_norm(x, shape, weight, eps) if bias is None else None


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor | None:
    """GroupNorm by torch's kernel."""
    fits = not x.is_cpu and x.dim() >= 2 and _alike(x, weight, bias) and groups > 0 and x.shape[1] % groups == 0
    return F.group_norm(x, groups, weight, bias, eps) if fits else None
