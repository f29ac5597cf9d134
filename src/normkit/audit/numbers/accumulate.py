"""Sums over batches, in float64, from which the numbers are formed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.audit.numbers.record import OUTLIER

_ROWS_AT_ONCE = 2**22


class Values:
    """Square sum, largest magnitude and, per channel, sum and square sum of a tensor over calls and batches.

    Args:
        channel_dim: the dim whose indices are channels; None for no figures per channel.
    """

    def __init__(self, channel_dim: int | None = None) -> None:
        self.channel_dim = channel_dim
        self.squares = 0.0
        self.count = 0
        self.max = 0.0
        self.nonfinite = 0
        self.rows = 0
        self.sum: Tensor | None = None
        self.square_sum: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Take in one tensor; what is not finite is counted and otherwise taken as 0."""
        if not x.is_floating_point() or x.numel() == 0 or x.is_meta:
            return
        x = x.detach()
        per_channel = self.channel_dim is not None and -x.dim() <= self.channel_dim < x.dim()
        flat = x.movedim(self.channel_dim or 0, -1).flatten(0, -2) if per_channel and x.dim() > 1 else x.reshape(1, -1)
        for part in flat.split(max(1, _ROWS_AT_ONCE // max(1, flat.shape[-1]))):
            finite = part.isfinite()
            lost = int((~finite).sum())
            values = torch.where(finite, part, 0).double() if lost else part.double()
            squares = values.square().sum(0)
            self.squares += squares.sum().item()
            self.max = max(self.max, values.abs().max().item())
            self.nonfinite += lost
            if per_channel and x.dim() > 1:
                self._channels(values.sum(0).cpu(), squares.cpu(), len(part))
        self.count += x.numel()

    def _channels(self, total: Tensor, squares: Tensor, rows: int) -> None:
        if self.sum is None or self.square_sum is None:
            self.sum, self.square_sum, self.rows = total, squares, rows
        elif self.sum.shape == total.shape:
            self.sum += total
            self.square_sum += squares
            self.rows += rows
        else:  # a norm that is called with several widths has no channels of its own
            self.channel_dim = self.sum = self.square_sum = None

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def mean_and_var(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Mean and biased variance of each channel."""
        if self.sum is None or self.square_sum is None:
            return None, None
        mean = self.sum / self.rows
        return mean, (self.square_sum / self.rows - mean.square()).clamp_min(0)

    def outliers(self) -> tuple[float, tuple[int, ...]]:
        """The largest channel's RMS over the median's, and the channels at least ``OUTLIER`` times the median."""
        if self.square_sum is None:
            return 1.0, ()
        rms = (self.square_sum / self.rows).sqrt()
        median = rms.median()
        if median <= 0:
            return 1.0 if rms.max() == 0 else math.inf, tuple(int(i) for i in rms.nonzero().flatten())
        ratio = rms / median
        return ratio.max().item(), tuple(int(i) for i in (ratio >= OUTLIER).nonzero().flatten())


def largest_logit(query: Tensor, key: Tensor, *, scale: float | None, causal: bool, mask: Tensor | None) -> float:
    """The largest ``|q . k| * scale`` among the pairs that the mask lets through.

    Args:
        query, key: ``(..., H, T, D)`` and ``(..., H_k, S, D)``; H is a multiple of H_k.
        scale: None for ``D ** -0.5``.
        causal: whether a position attends to no later one.
        mask: True, or a finite number above -1e4, lets a pair through; broadcast to ``(..., H, T, S)``.
    """
    query, key = query.detach(), key.detach()
    if query.dim() >= 3 and query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    rows, columns = query.shape[-2], key.shape[-2]
    allowed = query.new_ones(rows, columns, dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & (mask if mask.dtype is torch.bool else mask > -1e4)
    allowed = allowed.expand(*query.shape[:-1], columns)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    largest = 0.0
    heads = zip(
        query.reshape(-1, rows, query.shape[-1]),
        key.reshape(-1, columns, key.shape[-1]),
        allowed.reshape(-1, rows, columns),
        strict=True,
    )
    for q, k, keep in heads:
        products = (q.float() @ k.float().T).abs().masked_fill(~keep, 0)
        largest = max(largest, products.max().item() * abs(factor)) if products.numel() else largest
    return largest
