"""torch's own fused operators, for devices without a kernel of ours and for CPUs without the extension.

Each function answers None where torch would not compute the same thing; the plain form runs then. On the CPU torch's
channel norms are left out: they lose digits for a large mean in channels-last memory, and the plain form does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.ops.autograd import transforms_active
from normkit.spec import NormSpec

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
    fits = x.dim() >= 2 and _alike(x, weight, bias) and groups > 0 and x.shape[1] % groups == 0
    return F.group_norm(x, groups, weight, bias, eps) if fits else None


def evaluate(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> Tensor | None:
    """Any spec that torch has an operator for."""
    if spec.statistic != "mean_square" or spec.eps_at != "variance" or spec.partial != 1 or spec.gate is not None:
        return None
    plain = spec.rounding == "after_gain" and spec.output_dtype == "input" and spec.weight_shape == "features"
    fits = (weight is not None) == spec.has_weight and (bias is not None) == spec.has_bias
    if not (plain and fits) or spec.weight_offset != 0 or not _alike(x, weight, bias):
        return None
    if spec.axes == "features":
        if spec.channel_dim != -1 or spec.groups != 1:
            return None
        return row_norm(spec.centered, x, weight, bias, spec.eps, 0.0, False, None)
    if spec.channel_dim != 1 or not spec.centered or x.dim() < 2 or x.numel() == 0:
        return None
    if any(p is not None and p.shape != x.shape[1:2] for p in (weight, bias, running_mean, running_var)):
        return None
    if running_mean is not None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, spec.eps)
    if spec.axes == "batch":
        several = x.numel() > x.shape[1]
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, spec.eps) if several else None
    if spec.axes == "instance" and x.dim() < 3:
        return None
    return group_norm(x, weight, bias, spec.groups if spec.axes == "group" else x.shape[1], spec.eps)
