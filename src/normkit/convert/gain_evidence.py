"""What a norm's stored values say about their convention: gains themselves (w), or gains less one (1 + w).

A trained gain is positive nearly everywhere, spreads over a norm like a log-normal, and starts at 1. Each reading
turns the stored values into gains, and the gains are more or less likely to be a norm's::

    g = offset + stored          evidence(offset) = n * mean log p(stored | mu, s)  + log p(mu) + log p(s) + log s

with ``mu`` and ``s`` fitted in the logarithm. The score is evidence(0) - evidence(1) in nats: positive for w, negative
for 1 + w. Values of one norm are no independent draws and no distribution is exactly right, so they count as
``n`` = a quarter of their number, and at most 16.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Convention = Literal["w", "1+w"]
OFFSETS: dict[Convention, float] = {"w": 0.0, "1+w": 1.0}
"""What is added to the stored values to give the gain."""
CONSTANT = 7.0
"""The score of a norm at its start: exactly 1 everywhere, or exactly 0."""
_COUNTED = (0.25, 16.0)
_ENOUGH = 16
"""Fewer values say nothing certain of their own spread: the score shrinks with them."""
_OUTLIERS = 0.03
_STARTS = (0.4, 0.05)
"""Weight and width, in the logarithm, of gains that stayed near where training starts."""
_LOCATION = 0.8
"""Laplace scale of log of a norm's middle gain: a factor of 2 either way is usual, of 20 is not rare."""
_SPREAD = (math.log(0.25), 0.8)
"""Of log of the spread within a norm."""
_FLOOR = 0.005


def score(stored: Tensor) -> float:
    """How far the values favour w (positive) over 1 + w (negative), in nats; 0 where they cannot tell."""
    values = stored.detach().double().flatten()
    values = values[torch.isfinite(values)]
    if not values.numel():
        return 0.0
    if float(values.min()) == float(values.max()):
        return {1.0: CONSTANT, 0.0: -CONSTANT}.get(float(values[0]), 0.0)
    enough = min(1.0, values.numel() / _ENOUGH)
    return enough * (_evidence(values, 0.0) - _evidence(values, 1.0))


def _evidence(stored: Tensor, offset: float) -> float:
    gains = stored + offset
    size = gains.abs().clamp_min(1e-12).log()
    middle = float(size.median())
    low, high = torch.quantile(size, torch.tensor([0.16, 0.84], dtype=size.dtype)).tolist()
    spread = max((high - low) / 2, _FLOOR)
    usual = torch.exp(-((size - middle) ** 2) / (2 * spread**2)) / (spread * math.sqrt(2 * math.pi))
    usual = torch.where(gains > 0, usual * torch.exp(-size), 0.0)
    scale = 3.0 * math.exp(middle)  # outliers, of either sign: Cauchy
    rare = scale / (math.pi * (scale**2 + gains**2))
    likelihood = float(((1 - _OUTLIERS) * usual + _OUTLIERS * rare).log().mean())
    count = min(_COUNTED[0] * stored.numel(), _COUNTED[1])
    return count * likelihood + _location(middle) + _spread(spread) + math.log(spread)


def _location(middle: float) -> float:
    near, width = _STARTS
    start = near * math.exp(-((middle / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
    moved = (1 - near) * math.exp(-abs(middle) / _LOCATION) / (2 * _LOCATION)
    return math.log(start + moved)


def _spread(spread: float) -> float:
    middle, width = _SPREAD
    return -(((math.log(spread) - middle) / width) ** 2) / 2


def shift(values: Tensor, by: float) -> Tensor:
    """The values moved, formed in float32 (float64 stays) and rounded to their dtype once."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).add(by).to(values.dtype)
