"""A stack of Transformer layers out of normkit's parts, with any norm module: what timings are taken on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import normkit.nn as norms
from normkit.lab.setups.written_out import WrittenLayerNorm, WrittenRMSNorm
from normkit.residual import Attention, FeedForward, Residual, ResidualStack

MakeNorm = Callable[[int], nn.Module]
IMPLEMENTATIONS: dict[str, dict[str, MakeNorm]] = {
    "written out": {"layer": WrittenLayerNorm, "rms": WrittenRMSNorm},
    "torch": {"layer": nn.LayerNorm, "rms": lambda d: nn.RMSNorm(d, eps=1e-6)},
    "normkit": {"layer": norms.LayerNorm, "rms": lambda d: norms.RMSNorm(d, eps=1e-6)},
}


def block_stack(norm: MakeNorm | None, *, depth: int, dim: int, heads: int = 4) -> ResidualStack:
    """``depth`` layers of attention and feed-forward layer in Pre-LN, or without any norm."""
    wiring = "none" if norm is None else "pre"
    branches: list[Residual] = []
    for _ in range(depth):
        for sublayer in (Attention(dim, heads), FeedForward(dim, 4 * dim, gated=False, act="gelu")):
            branches.append(Residual(sublayer, wiring, dim, norm=norm))
    return ResidualStack(branches, None if norm is None else norm(dim))


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A function that runs forward, backward and one step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
