"""A small Transformer on characters, built and trained as a user would."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from normkit.lab.setups.text import VOCABULARY, Corpus, fixed_windows, text, windows
from normkit.lab.setups.training import diverged, train
from normkit.residual import Transformer
from normkit.spec import TORCH_LAYER

UNIFORM = math.log(VOCABULARY)
"""The loss of a model that knows nothing; a run that diverged counts as this."""


class Run(NamedTuple):
    """A trained model's figures, in nats a character."""

    losses: list[float]
    validation: float


def language_model(**fields: Any) -> Transformer:
    """A decoder of width 32 with LayerNorm, two heads and ungated feed-forward layers, but for ``fields``."""
    defaults = {"dim": 32, "depth": 4, "heads": 2, "gated": False, "act": "gelu", "norm": TORCH_LAYER}
    return Transformer(vocab=VOCABULARY, **(defaults | fields))


def language_loss(model: Transformer, tokens: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Cross-entropy of the next character, plus ``z_loss * mean(log Z^2)`` (PaLM, arXiv:2204.02311)."""
    scores = model(tokens).flatten(0, 1)
    loss = cross_entropy(scores, targets.flatten())
    return loss + z_loss * scores.logsumexp(-1).pow(2).mean() if z_loss else loss


@torch.no_grad()
def validate(model: Transformer, corpus: Corpus = "source", batch: int = 64, length: int = 16) -> float:
    """The loss on windows that are the same for every model; that of ignorance where it is larger or not finite."""
    loss = language_loss(model, *fixed_windows(text(corpus).validation, batch, length)).item()
    return min(loss, UNIFORM) if math.isfinite(loss) else UNIFORM


def train_language(
    model: Transformer,
    *,
    steps: int,
    rate: float,
    warm_up: int = 0,
    corpus: Corpus = "source",
    batch: int = 8,
    length: int = 16,
    weight_decay: float = 0.0,
    clip: float | None = None,
    z_loss: float = 0.0,
) -> Run:
    """Train by AdamW with a constant rate after warm-up; the batches are drawn from torch's generator."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=weight_decay, fused=True)
    characters = text(corpus).train

    def loss() -> Tensor:
        return language_loss(model, *windows(characters, batch, length), z_loss)

    losses = train((loss for _ in range(steps)), optimizer, warm_up=warm_up, clip=clip)
    return Run(losses, UNIFORM if diverged(losses) else validate(model, corpus, length=length))
