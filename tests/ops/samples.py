"""Arguments of every operator, for opcheck."""

from __future__ import annotations

from typing import Any

import torch

_G = torch.Generator().manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=_G, dtype=torch.float64).to(dtype)


def arguments(name: str, requires_grad: bool = False) -> tuple[Any, ...]:
    """Arguments that the operator ``name`` takes; every floating input asks for a gradient if told to."""
    args = _arguments(name)
    if requires_grad:
        args = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    return args


def _arguments(name: str) -> tuple[Any, ...]:
    x, residual, w, b = randn(3, 5, 24), randn(3, 5, 24), randn(24), randn(24)
    options = (1e-5, 1.0, False, False)
    rows = (w, b, *options)
    rstd, mean = randn(3, 5).abs(), randn(3, 5, dtype=torch.float64)
    v, g, cw, cb = randn(2, 6, 4, 5), randn(2, 6, 4, 5), randn(6), randn(6)
    c_mean, c_var = randn(6, dtype=torch.float64), randn(6, dtype=torch.float64).abs() + 0.5
    count = torch.tensor(40.0, dtype=torch.float64)
    mask = torch.rand(2, 4, 5, generator=_G) > 0.3
    table: dict[str, tuple[Any, ...]] = {
        "rms_norm_backward": (residual, x, w, rstd, 1e-5, 1.0, False, None, True, torch.float32),
        "layer_norm_backward": (residual, x, w, mean, rstd, 1e-5, 1.0, False, residual.clone(), True, torch.float32),
        "gated_rms_norm": (x, residual, w, *options, True, False),
        "gated_rms_norm_with_statistics": (x, residual, w, *options, True, False),
        "gated_rms_norm_out": (x, residual, w, *options, True, False, torch.empty_like(x)),
        "gated_rms_norm_backward": (randn(3, 5, 24), x, residual, w, rstd, 1e-5, 1.0, False, True, True, True),
        "group_norm": (v, cw, cb, 3, 1e-5),
        "group_norm_with_statistics": (v, cw, cb, 3, 1e-5),
        "group_norm_out": (v, cw, cb, 3, 1e-5, torch.empty_like(v)),
        "group_norm_backward": (
            g, v, cw, randn(2, 3, dtype=torch.float64), randn(2, 3, dtype=torch.float64).abs() + 0.5, 3, 1e-5, True,
            torch.float32,
        ),
        "batch_norm_train": (v, cw, cb, mask, 1e-5),
        "batch_norm_train_out": (
            v, cw, cb, None, 1e-5, torch.empty_like(v), c_mean.clone(), c_var.clone(), count.clone(),
        ),
        "batch_norm": (v, c_mean, c_var, cw, cb, None, 1e-5),
        "batch_norm_frozen": (v, c_mean, c_var, cw, cb, None, 1e-5),
        "batch_norm_out": (v, c_mean, c_var, cw, cb, mask, 1e-5, torch.empty_like(v)),
        "batch_norm_backward": (g, v, cw, c_mean, c_var, count, None, 1e-5, True, torch.float32),
        "update_running": (randn(6), randn(6).abs(), c_mean, c_var, count, 0.1),
        "channel_layer_norm": (v, cw, cb, 1e-5),
        "channel_layer_norm_with_statistics": (v, cw, cb, 1e-5),
        "channel_layer_norm_out": (v, cw, cb, 1e-5, torch.empty_like(v)),
        "channel_layer_norm_backward": (
            g, v, cw, randn(2, 20, dtype=torch.float64), randn(2, 20, dtype=torch.float64).abs(), 1e-5, True,
            torch.float32,
        ),
    }  # fmt: skip
    if name in table:
        return table[name]
    first = (x, residual) if name.startswith("add_") else (x,)
    if name.endswith("_inplace"):
        return *first, *rows, torch.empty_like(x)
    if name.endswith("_out"):
        return *first, *rows, *(torch.empty_like(x) for _ in first)
    return *first, *rows, None
