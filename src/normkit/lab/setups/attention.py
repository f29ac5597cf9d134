"""Attention logits of a trained `Transformer`, computed beside it from its queries and keys."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from normkit.residual import Attention, Transformer


@torch.no_grad()
def largest_attention_logit(model: Transformer, tokens: Tensor) -> float:
    """The largest absolute score before the softmax, over layers, heads and positions that a query may see.

    Queries and keys are read behind their norms; a soft-cap is applied, and rotary positions are not: the model must
    have learned positions or none.
    """
    assert model.config.positions != "rotary"
    seen: dict[tuple[int, str], Tensor] = {}

    def note(key: tuple[int, str], module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen[key] = out

    layers = [m for m in model.modules() if isinstance(m, Attention)]
    handles = []
    for n, layer in enumerate(layers):
        for side in ("query", "key"):
            source = getattr(layer, f"{side}_norm") or getattr(layer, side)
            handles.append(source.register_forward_hook(partial(note, (n, side))))
    model(tokens)
    for handle in handles:
        handle.remove()
    largest = 0.0
    for n, layer in enumerate(layers):
        q, k = (_heads(seen[n, side], layer.heads, layer.head_dim) for side in ("query", "key"))
        scores = q @ k.transpose(-1, -2) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        largest = max(largest, scores.tril().abs().max().item())
    return largest if math.isfinite(largest) else math.inf


def _heads(x: Tensor, heads: int, size: int) -> Tensor:
    """``(B, H, T, D)`` from ``(B, T, H * D)``; a norm within each head leaves it so already."""
    return x if x.dim() == 4 else x.unflatten(-1, (heads, size)).transpose(1, 2)
