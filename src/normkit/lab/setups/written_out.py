"""LayerNorm and RMSNorm as tutorials write them out, one operation at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WrittenLayerNorm(nn.Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` in plain operations."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(variance + 1e-6)) + self.bias


class WrittenRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` in plain operations."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
