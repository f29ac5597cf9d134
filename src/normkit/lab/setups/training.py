"""One training loop for all experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

DIVERGED = 1e4
"""A loss past this ends a run: it does not come back in the few steps of an experiment."""


def train(
    losses: Iterable[Callable[[], Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    warm_up: int = 0,
    cosine: int | None = None,
    clip: float | None = None,
    after: Callable[[int], None] | None = None,
) -> list[float]:
    """Take one step for each loss, and return their values; a run that diverges ends early, with infinity.

    Args:
        losses: functions, each computing the loss of its step's batch.
        optimizer: stepped once a loss.
        warm_up: the number of steps over which the learning rate rises linearly from 0; constant after that.
        cosine: the number of steps over which the rate falls to 0 along half a cosine.
        clip: the largest norm of the gradient.
        after: called with the number of each finished step, from 0.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found: list[float] = []
    for step, compute in enumerate(losses):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            falling = 1.0 if cosine is None else (1 + math.cos(math.pi * step / cosine)) / 2
            group["lr"] = rate * min(1.0, (step + 1) / (warm_up + 1)) * falling
        loss = compute()
        value = loss.item()
        if not math.isfinite(value) or value > DIVERGED:
            found.append(math.inf)
            break
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        found.append(value)
        if after is not None:
            after(step)
    return found


def classification(model: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Callable[[], Tensor]]:
    """The cross-entropy of each batch, for `train`."""
    for x, y in pairs:
        yield lambda x=x, y=y: cross_entropy(model(x), y)


def diverged(losses: list[float]) -> bool:
    """Whether a run ended early."""
    return bool(losses) and not math.isfinite(losses[-1])


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of right answers, in the mode that the model is in; 0 where the outputs are not finite."""
    scores = model(x)
    right = (scores.argmax(-1) == y) & scores.isfinite().all(-1)
    return right.float().mean().item()
