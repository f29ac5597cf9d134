"""normkit, torch's own functions, and the form that model code spells out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit import functional as nf
from normkit import ops
from normkit.bench.grid import EPS, MOMENTUM, RMS_EPS, Case, Inputs, groups_of
from normkit.bench.providers.step import Step, torch_step

Form = Callable[..., Any]
"""A function of a case's arguments."""
Into = Callable[..., Any]
"""A function of a case's arguments and, by keyword, the tensors that it writes."""
aten = torch.ops.aten

# ---- forward into a new tensor ----

NORMKIT: dict[str, Form] = {
    "layer_norm": lambda x, w, b: nf.layer_norm(x, w.shape, w, b),
    "rms_norm": lambda x, w: nf.rms_norm(x, w.shape, w, RMS_EPS),
    "add_rms_norm": lambda x, r, w: nf.rms_norm(x, w.shape, w, RMS_EPS, residual=r),
    "gated_rms_norm": lambda x, g, w: nf.rms_norm(x, w.shape, w, RMS_EPS, gate=g),
    "qk_rms_norm": lambda x, w: nf.rms_norm(x, w.shape, w, RMS_EPS),
    "group_norm": lambda x, w, b: nf.group_norm(x, groups_of(x.shape[1]), w, b),
    "instance_norm": lambda x, w, b: nf.instance_norm(x, None, None, w, b),
    "batch_norm_train": lambda x, w, b, mean, var: nf.batch_norm(x, mean, var, w, b, True),
    "batch_norm": lambda x, w, b, mean, var: nf.batch_norm(x, mean, var, w, b),
    "channel_layer_norm": lambda x, w, b: nf.layer_norm(x, w.shape, w, b, channel_dim=1),
}


def _torch_rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, RMS_EPS)


def _torch_add_rms(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_rms(total, w), total


TORCH: dict[str, Form] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "rms_norm": _torch_rms,
    "add_rms_norm": _torch_add_rms,
    "gated_rms_norm": lambda x, g, w: _torch_rms(x, w) * F.silu(g),
    "qk_rms_norm": _torch_rms,
    "group_norm": lambda x, w, b: F.group_norm(x, groups_of(x.shape[1]), w, b),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "batch_norm_train": lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b, True, MOMENTUM),
    "batch_norm": lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b),
    "channel_layer_norm": lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), w.shape, w, b).permute(0, 3, 1, 2),
}


def _spelled_rms(x: Tensor, w: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + RMS_EPS)
    return w * h.to(x.dtype)


def _spelled_add_rms(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _spelled_rms(total, w), total


def _spelled_channel_layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    return w[:, None, None] * ((x - u) / torch.sqrt(s + EPS)) + b[:, None, None]


MODEL_CODE: dict[str, Form] = {
    "rms_norm": _spelled_rms,
    "add_rms_norm": _spelled_add_rms,
    "gated_rms_norm": lambda x, g, w: (_spelled_rms(x, w).float() * F.silu(g.to(torch.float32))).to(x.dtype),
    "qk_rms_norm": _spelled_rms,
    "channel_layer_norm": _spelled_channel_layer,
}
"""As Llama, Mamba 2, Qwen 3 and ConvNeXt write it; the other norms are torch's own in model code, too."""

# ---- forward into given tensors ----


def _normkit_batch_train_out(
    x: Tensor, w: Tensor, b: Tensor, running_mean: Tensor, running_var: Tensor, *, out: Tensor, mean: Tensor,
    variance: Tensor, count: Tensor,
) -> None:  # fmt: skip
    ops.batch_norm_train_out(x, w, b, out=out, mean=mean, variance=variance, count=count)
    ops.update_running(running_mean, running_var, mean, variance, count, MOMENTUM)


NORMKIT_OUT: dict[str, Into] = {
    "layer_norm": ops.layer_norm_out,
    "rms_norm": ops.rms_norm_out,
    "add_rms_norm": ops.add_rms_norm_out,
    "gated_rms_norm": ops.gated_rms_norm_out,
    "qk_rms_norm": ops.rms_norm_out,
    "group_norm": lambda x, w, b, *, out: ops.group_norm_out(x, w, b, groups_of(x.shape[1]), out=out),
    "instance_norm": lambda x, w, b, *, out: ops.group_norm_out(x, w, b, x.shape[1], out=out),
    "batch_norm_train": _normkit_batch_train_out,
    "batch_norm": lambda x, w, b, mean, var, *, out: ops.batch_norm_out(x, mean, var, w, b, out=out),
    "channel_layer_norm": ops.channel_layer_norm_out,
}


def _torch_rms_out(x: Tensor, w: Tensor, *, out: Tensor) -> Tensor:
    return torch.mul(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + RMS_EPS), w, out=out)


def _torch_add_rms_out(x: Tensor, residual: Tensor, w: Tensor, *, out: Tensor, sum: Tensor) -> None:
    torch.add(x, residual, out=sum)
    _torch_rms_out(sum, w, out=out)


def _torch_gated_out(x: Tensor, gate: Tensor, w: Tensor, *, out: Tensor) -> None:
    _torch_rms_out(x, w, out=out)
    out.mul_(F.silu(gate))


def _native(function: Any, outputs: tuple[str, ...], *args: Any, out: Tensor) -> Callable[[], Any]:
    """A call of one of torch's native norms into ``out`` and into statistics of the dtype that it makes itself."""
    _, *statistics = function.default(*args)
    targets = dict(zip(outputs, (out, *statistics), strict=True))
    overload = function.out
    return lambda: overload(*args, **targets)


def _torch_native(case: Case, i: Inputs, out: Tensor) -> Callable[[], Any] | None:
    w, b = i.weight, i.bias
    n, c = i.x.shape[:2]
    rows, batch = ("out0", "out1", "out2"), ("out", "save_mean", "save_invstd")
    if case.norm == "layer_norm":
        return _native(aten.native_layer_norm, rows, i.x, w.shape, w, b, EPS, out=out)
    if case.norm == "channel_layer_norm" and case.channels_last:
        x, out = i.x.permute(0, 2, 3, 1), out.permute(0, 2, 3, 1)
        return _native(aten.native_layer_norm, rows, x, w.shape, w, b, EPS, out=out)
    if case.norm == "group_norm":
        space = i.x.shape[2:].numel()
        return _native(aten.native_group_norm, rows, i.x, w, b, n, c, space, groups_of(c), EPS, out=out)
    if case.norm in ("batch_norm", "batch_norm_train"):
        train = case.norm == "batch_norm_train"
        return _native(aten.native_batch_norm, batch, i.x, w, b, i.mean, i.var, train, MOMENTUM, EPS, out=out)
    if case.norm == "instance_norm" and not case.channels_last:  # F.instance_norm is a batch norm of one sample, too
        shape = (1, n * c, *i.x.shape[2:])
        args = (i.x.view(shape), w.repeat(n), b.repeat(n), None, None, True, 0.0, EPS)
        return _native(aten.native_batch_norm, batch, *args, out=out.view(shape))
    return None


TORCH_OUT: dict[str, Into] = {
    "rms_norm": _torch_rms_out,
    "qk_rms_norm": _torch_rms_out,
    "add_rms_norm": _torch_add_rms_out,
    "gated_rms_norm": _torch_gated_out,
}


def targets_of(case: Case, i: Inputs) -> dict[str, Tensor]:
    """The tensors that a preallocated step writes; a slice's result is dense."""
    out = torch.empty(i.x.shape, dtype=i.x.dtype) if case.norm == "qk_rms_norm" else torch.empty_like(i.x)
    return {"out": out, "sum": torch.empty_like(i.x)} if case.norm == "add_rms_norm" else {"out": out}


def _into(case: Case, i: Inputs, function: Into, **more: Tensor) -> Step:
    args, targets = i.of(case), targets_of(case, i)
    results = tuple(targets.values())
    return Step(lambda: function(*args, **targets, **more), lambda _: results)


def normkit(case: Case, inputs: Inputs) -> Step:
    """The public functions; in preallocated cases the operators' ``out=`` forms."""
    if case.mode != "preallocated":
        return torch_step(case, inputs, NORMKIT[case.norm])
    more = {}
    if case.norm == "batch_norm_train":
        channels = inputs.x.shape[1]
        more = {k: torch.empty(channels, dtype=torch.float64) for k in ("mean", "variance")}
        more["count"] = torch.empty((), dtype=torch.float64)
    return _into(case, inputs, NORMKIT_OUT[case.norm], **more)


def torch_eager(case: Case, inputs: Inputs) -> Step | None:
    """``torch.nn.functional``; in preallocated cases torch's ``out=`` forms, where there are any."""
    if case.mode != "preallocated":
        return torch_step(case, inputs, TORCH[case.norm])
    if case.norm in TORCH_OUT:
        return _into(case, inputs, TORCH_OUT[case.norm])
    out = targets_of(case, inputs)["out"]
    call = _torch_native(case, inputs, out)
    return None if call is None else Step(call, lambda _: (out,))


def model_code(case: Case, inputs: Inputs) -> Step | None:
    """Forward into a new tensor, and training; only where model code does not call torch's function."""
    if case.mode == "preallocated" or case.norm not in MODEL_CODE:
        return None
    return torch_step(case, inputs, MODEL_CODE[case.norm])
