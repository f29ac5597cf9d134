"""What the tests of `identify` make foreign modules of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

D = 32


class Fn(nn.Module):
    """A function as a module, with tensors as its parameters."""

    def __init__(self, function: Callable[..., Any], **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 16, D), generator=torch.Generator().manual_seed(0))
