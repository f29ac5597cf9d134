"""A model for the explain command to look into."""

from __future__ import annotations

import torch

import normkit


def factory() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    linear, norm = torch.nn.Linear(6, 6), normkit.nn.RMSNorm(6, eps=1e-6, weight_offset=1.0)
    torch.nn.init.normal_(norm.weight, std=0.2)
    model = torch.nn.Sequential()
    model.add_module("linear", linear)
    model.add_module("norm", norm)
    return model, torch.randn(2, 3, 6)
