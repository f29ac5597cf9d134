"""Sublayers of other people's making, and one straight-line formula for each placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normkit.residual import InnerNorm, Residual, mlp_roles

ROLES = mlp_roles("fc1", "fc2")


class Mlp(nn.Module):
    """A feed-forward layer that knows nothing of normkit."""

    def __init__(self, dim: int, hidden: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


def scramble(module: nn.Module, scale: float = 0.3) -> None:
    """Move every parameter off its start, so that no gain is 1 and no bias 0."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * scale)


def layer_norm(x: Tensor, norm: Any, eps: float = 1e-5) -> Tensor:
    """LayerNorm written out, with a module's gain and bias."""
    c = x - x.mean(-1, keepdim=True)
    return c / (c.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias


def mlp(x: Tensor, f: Any) -> Tensor:
    """`Mlp` written out; its second projection may sit behind an inner norm."""
    h = torch.tanh(x @ f.fc1.weight.T + f.fc1.bias)
    last = f.fc2
    if isinstance(last, InnerNorm):
        h, last = layer_norm(h, last.norm), last.projection
    return h @ last.weight.T + last.bias


def formulas(depth: int, layer: int) -> dict[str, Callable[[Tensor, Residual], Tensor]]:
    """y of one feed-forward branch, for every placement, from its paper's equation and in plain operations."""
    alpha = (2 * depth) ** 0.25

    def f(x: Tensor, r: Residual) -> Tensor:
        return mlp(x, r.sublayer)

    def pre(x: Tensor, r: Residual) -> Tensor:
        return x + f(layer_norm(x, r.input_norm), r)

    def post(x: Tensor, r: Residual) -> Tensor:
        return layer_norm(x + f(x, r), r.stream_norm)

    def none(x: Tensor, r: Residual) -> Tensor:
        return x + f(x, r)

    def learned(x: Tensor, r: Residual) -> Tensor:
        return x + r.branch_scale * f(x, r)

    return {
        "none": none,
        "pre": pre,
        "post": post,
        "sandwich": lambda x, r: x + layer_norm(f(layer_norm(x, r.input_norm), r), r.output_norm),
        "output": lambda x, r: x + layer_norm(f(x, r), r.output_norm),
        "deepnorm": lambda x, r: layer_norm(alpha * x + f(x, r), r.stream_norm),
        "sub": pre,  # the inner norm is inside mlp()
        "normformer": pre,
        "scaled": lambda x, r: x + f(layer_norm(x, r.input_norm) / layer**0.5, r),
        "parallel": pre,
        "layerscale": lambda x, r: x + r.branch_scale * f(layer_norm(x, r.input_norm), r),
        "rezero": learned,
        "skipinit": learned,
        "fixup": lambda x, r: x + r.branch_scale * (f(x + r.input_bias, r) + r.output_bias),
        "mix": post if layer <= depth // 4 else pre,
        "hybrid": none,
        "hybrid_first_pre": pre if layer == 1 else none,
    }
