"""Transformers on one position a sequence, at initialization: the setting of the papers' derivations.

Attention is then its value path, so queries and keys play no part (as with Q = K = 0); feed-forward layers are as
wide as the stream, with ReLU and without gate; matrices are Xavier's, or the placement's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normkit.residual import Stream, Transformer
from normkit.spec import TORCH_LAYER

VOCABULARY = 64


def single_model(placement: str, depth: int, dim: int = 64, **fields: Any) -> Transformer:
    """A model drawn from torch's generator; embeddings and head have standard deviation 1."""
    return Transformer(
        vocab=VOCABULARY,
        dim=dim,
        depth=depth,
        heads=1,
        ffn_dim=dim,
        gated=False,
        act="relu",
        placement=placement,
        norm=TORCH_LAYER,
        positions="none",
        tie_embeddings=False,
        embedding_std=1.0,
        **fields,
    )


def single_data(batch: int = 64) -> tuple[Tensor, Tensor]:
    """Tokens ``(B, 1)`` and as many targets, from torch's generator."""
    return torch.randint(0, VOCABULARY, (batch, 1)), torch.randint(0, VOCABULARY, (batch, 1))


def single_logits(model: Transformer, tokens: Tensor, scale: float | None = None) -> Tensor:
    """Logits ``(B, V)`` times ``scale``: by default dim^(-1/2), which gives them variance 1."""
    return model(tokens)[:, 0] * (1 / math.sqrt(model.config.dim) if scale is None else scale)


def stream_states(model: Transformer, tokens: Tensor) -> list[Tensor]:
    """The stream behind each layer, before a final norm."""
    stream, states = Stream(model.embed(tokens)), []
    for layer in model.stack.layers:
        stream = layer(stream)
        states.append(stream.settle())
    return states


def last_gradient(model: Transformer, samples: int, scale: float | None = None) -> float:
    """The norm of the gradient of the last feed-forward layer's second matrix, the mean over single samples.

    Over a batch, gradients of samples that grow alike with depth would add up.
    """
    tokens, targets = single_data(samples)
    weight = model.stack.layers[-1].ffn.sublayer.down.weight
    found = []
    for n in range(samples):
        loss = torch.nn.functional.cross_entropy(single_logits(model, tokens[n : n + 1], scale), targets[n])
        found.append(torch.autograd.grad(loss, weight)[0].norm().item())
    return sum(found) / len(found)
