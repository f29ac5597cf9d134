"""Plain and residual multilayer perceptrons on the digits, with any norm between their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

import normkit.nn as norms
from normkit.placement import Placement
from normkit.residual import Residual, ResidualStack, mlp_roles

NormName = Literal["none", "batch", "layer", "rms"]
PIXELS, CLASSES = 64, 10


def make_norm(name: NormName, features: int) -> nn.Module:
    """The norm of that name over the last dim."""
    makers: dict[str, Callable[[int], nn.Module]] = {
        "none": lambda _: nn.Identity(),
        "batch": lambda n: norms.BatchNorm(n, channel_dim=-1),
        "layer": norms.LayerNorm,
        "rms": lambda n: norms.RMSNorm(n, eps=1e-6),
    }
    return makers[name](features)


def mlp(
    norm: NormName,
    *,
    depth: int = 5,
    width: int = 64,
    act: type[nn.Module] = nn.ReLU,
    after: Callable[[], nn.Module] | None = None,
) -> nn.Sequential:
    """``depth`` times linear, norm, whatever ``after`` makes, activation; then the classes' scores.

    Every hidden layer is a `torch.nn.Sequential` of its own.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for n in range(depth):
        parts = [nn.Linear(PIXELS if n == 0 else width, width), make_norm(norm, width)]
        parts += [after()] if after is not None else []
        layers.append(nn.Sequential(*parts, act()))
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Branch(nn.Module):
    """Two linear maps around a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def matrix_roles(self) -> tuple:
        """What the two maps are to an initialization."""
        return mlp_roles("up", "down")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def residual_mlp(placement: str | Placement, *, depth: int, width: int = 64) -> nn.Sequential:
    """``depth`` residual branches between a first and a last linear map."""
    branches = [Residual(Branch(width), placement, width, depth=depth, layer=n + 1, kind="ffn") for n in range(depth)]
    ends = branches[0].placement.final_norm
    stack = ResidualStack(branches, norms.LayerNorm(width) if ends else None)
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width), stack, nn.Linear(width, CLASSES))
