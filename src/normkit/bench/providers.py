"""Who computes it: normkit, torch eager, the form that model code spells out, and torch.compile of the latter.

A provider is a function of a case that gives a callable on its inputs, or None where it has nothing for the case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit import ops
from normkit.bench.grid import Case, Inputs

GROUPS = 32
Run = Callable[[Inputs], Any]
Provider = Callable[[Case], Run | None]
aten = torch.ops.aten


# ---- forward into a new tensor ----


def _groups(x: Tensor) -> int:
    return GROUPS if x.shape[1] % GROUPS == 0 else 1


def _normkit_batch_train(i: Inputs) -> Tensor:
    y, mean, var, count = ops.batch_norm_train(i.x, i.weight, i.bias)
    ops.update_running(i.mean, i.var, mean, var, count, 0.1)
    return y


NORMKIT: dict[str, Run] = {
    "layer_norm": lambda i: ops.layer_norm(i.x, i.weight, i.bias),
    "rms_norm": lambda i: ops.rms_norm(i.x, i.weight),
    "add_rms_norm": lambda i: ops.add_rms_norm(i.x, i.other, i.weight),
    "gated_rms_norm": lambda i: ops.gated_rms_norm(i.x, i.other, i.weight),
    "qk_rms_norm": lambda i: ops.rms_norm(i.x, i.weight),
    "group_norm": lambda i: ops.group_norm(i.x, i.weight, i.bias, _groups(i.x)),
    "instance_norm": lambda i: ops.instance_norm(i.x, i.weight, i.bias),
    "batch_norm_train": _normkit_batch_train,
    "batch_norm": lambda i: ops.batch_norm(i.x, i.mean, i.var, i.weight, i.bias),
    "channel_layer_norm": lambda i: ops.channel_layer_norm(i.x, i.weight, i.bias),
}


def _torch_add_rms(i: Inputs) -> tuple[Tensor, Tensor]:
    total = i.x + i.other
    return F.rms_norm(total, total.shape[-1:], i.weight, 1e-6), total


TORCH: dict[str, Run] = {
    "layer_norm": lambda i: F.layer_norm(i.x, i.x.shape[-1:], i.weight, i.bias),
    "rms_norm": lambda i: F.rms_norm(i.x, i.x.shape[-1:], i.weight, 1e-6),
    "add_rms_norm": _torch_add_rms,
    "gated_rms_norm": lambda i: F.rms_norm(i.x, i.x.shape[-1:], i.weight, 1e-6) * F.silu(i.other),
    "qk_rms_norm": lambda i: F.rms_norm(i.x, i.x.shape[-1:], i.weight, 1e-6),
    "group_norm": lambda i: F.group_norm(i.x, _groups(i.x), i.weight, i.bias),
    "instance_norm": lambda i: F.instance_norm(i.x, None, None, i.weight, i.bias),
    "batch_norm_train": lambda i: F.batch_norm(i.x, i.mean, i.var, i.weight, i.bias, True),
    "batch_norm": lambda i: F.batch_norm(i.x, i.mean, i.var, i.weight, i.bias),
    "channel_layer_norm": lambda i: F.layer_norm(i.x.permute(0, 2, 3, 1), i.x.shape[1:2], i.weight, i.bias).permute(
        0, 3, 1, 2
    ),
}


def _spelled_rms(x: Tensor, weight: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def _spelled_add_rms(i: Inputs) -> tuple[Tensor, Tensor]:
    total = i.x + i.other
    return _spelled_rms(total, i.weight), total


def _spelled_channel_layer(i: Inputs) -> Tensor:
    u = i.x.mean(1, keepdim=True)
    s = (i.x - u).pow(2).mean(1, keepdim=True)
    return i.weight[:, None, None] * ((i.x - u) / torch.sqrt(s + 1e-5)) + i.bias[:, None, None]


MODEL_CODE: dict[str, Run] = {
    "rms_norm": lambda i: _spelled_rms(i.x, i.weight),
    "add_rms_norm": _spelled_add_rms,
    "gated_rms_norm": lambda i: (_spelled_rms(i.x, i.weight).float() * F.silu(i.other.to(torch.float32))).to(i.x.dtype),
    "qk_rms_norm": lambda i: _spelled_rms(i.x, i.weight),
    "channel_layer_norm": _spelled_channel_layer,
}

# ---- forward into a given tensor ----

NORMKIT_OUT: dict[str, Callable[[Inputs, dict[str, Tensor]], Any]] = {
    "layer_norm": lambda i, o: ops.layer_norm_out(i.x, i.weight, i.bias, out=o["out"]),
    "rms_norm": lambda i, o: ops.rms_norm_out(i.x, i.weight, out=o["out"]),
    "add_rms_norm": lambda i, o: ops.add_rms_norm_out(i.x, i.other, i.weight, out=o["out"], sum=o["sum"]),
    "gated_rms_norm": lambda i, o: ops.gated_rms_norm_out(i.x, i.other, i.weight, out=o["out"]),
    "qk_rms_norm": lambda i, o: ops.rms_norm_out(i.x, i.weight, out=o["out"]),
    "group_norm": lambda i, o: ops.group_norm_out(i.x, i.weight, i.bias, _groups(i.x), out=o["out"]),
    "instance_norm": lambda i, o: ops.group_norm_out(i.x, i.weight, i.bias, i.x.shape[1], out=o["out"]),
    "batch_norm_train": lambda i, o: ops.batch_norm_train_out(i.x, i.weight, i.bias, **o),
    "batch_norm": lambda i, o: ops.batch_norm_out(i.x, i.mean, i.var, i.weight, i.bias, out=o["out"]),
    "channel_layer_norm": lambda i, o: ops.channel_layer_norm_out(i.x, i.weight, i.bias, out=o["out"]),
}


def _torch_rms_out(i: Inputs, o: dict[str, Tensor]) -> Tensor:
    return torch.mul(i.x * torch.rsqrt(i.x.pow(2).mean(-1, keepdim=True) + 1e-6), i.weight, out=o["out"])


TORCH_OUT: dict[str, Callable[[Inputs, dict[str, Tensor]], Any]] = {
    "layer_norm": lambda i, o: aten.native_layer_norm.out(
        i.x, i.x.shape[-1:], i.weight, i.bias, 1e-5, out0=o["out"], out1=o["mean"], out2=o["rstd"]
    ),
    "rms_norm": _torch_rms_out,
    "qk_rms_norm": _torch_rms_out,
    "group_norm": lambda i, o: aten.native_group_norm.out(
        i.x, i.weight, i.bias, i.x.shape[0], i.x.shape[1], i.x.shape[2] * i.x.shape[3], _groups(i.x), 1e-5,
        out0=o["out"], out1=o["mean"], out2=o["rstd"],
    ),
    "batch_norm_train": lambda i, o: aten.native_batch_norm.out(
        i.x, i.weight, i.bias, i.mean, i.var, True, 0.1, 1e-5, out=o["out"], save_mean=o["mean"], save_invstd=o["rstd"]
    ),
    "batch_norm": lambda i, o: aten.native_batch_norm.out(
        i.x, i.weight, i.bias, i.mean, i.var, False, 0.1, 1e-5, out=o["out"], save_mean=o["mean"], save_invstd=o["rstd"]
    ),
}  # fmt: skip


def _outputs(case: Case, i: Inputs, mine: bool) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {"out": torch.empty_like(i.x, memory_format=torch.preserve_format)}
    if case.norm == "qk_rms_norm":
        out["out"] = torch.empty(i.x.shape, dtype=i.x.dtype)
    if case.norm == "add_rms_norm":
        out["sum"] = torch.empty_like(i.x)
    if mine and case.norm == "batch_norm_train":
        c = i.x.shape[1]
        out |= {k: torch.empty(c, dtype=torch.float64) for k in ("mean", "variance")}
        out["count"] = torch.empty((), dtype=torch.float64)
    elif not mine:
        out |= {"mean": torch.empty(0, dtype=i.x.dtype), "rstd": torch.empty(0, dtype=i.x.dtype)}
    return out


def _pick(case: Case, table: dict[str, Run], out_table: dict[str, Any], mine: bool) -> Run | None:
    if case.mode != "preallocated":
        return table.get(case.norm)
    f = out_table.get(case.norm)
    if f is None:
        return None
    held: dict[str, Tensor] = {}

    def run(i: Inputs) -> Tensor:
        if not held:
            held.update(_outputs(case, i, mine))
            try:
                f(i, held)
            except RuntimeError:  # torch saves some statistics in float32 and some in x's dtype
                held.update((k, held[k].float()) for k in ("mean", "rstd"))
        f(i, held)
        return held["out"]

    return run


def _normkit(case: Case) -> Run | None:
    return _pick(case, NORMKIT, NORMKIT_OUT, True)


def _torch(case: Case) -> Run | None:
    return _pick(case, TORCH, TORCH_OUT, False)


def _model_code(case: Case) -> Run | None:
    return None if case.mode == "preallocated" else MODEL_CODE.get(case.norm)


def _compiled(case: Case) -> Run | None:
    if case.mode == "preallocated":
        return None
    f = MODEL_CODE.get(case.norm) or TORCH[case.norm]
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, dynamic=False)


PROVIDERS: dict[str, Provider] = {
    "normkit": _normkit,
    "torch": _torch,
    "model code": _model_code,
    "torch.compile": _compiled,
}
