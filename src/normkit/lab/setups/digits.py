"""scikit-learn's handwritten digits as tensors: 1797 images of 8 x 8, ten classes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """Images ``(N, 1, 8, 8)`` with mean 0 and variance 1 over the training part, and their classes."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@lru_cache(maxsize=1)
def _images() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'normkit[lab]'") from error
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None], torch.tensor(found.target)


def digits(noise: float = 0.0) -> Split:
    """Three quarters to train on and one to test on, always the same; ``noise`` is a normal one on every pixel.

    The noise is drawn from torch's generator.
    """
    images, classes = _images()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    train, test = order[:1347], order[1347:]
    x = (images - images[train].mean()) / images[train].std()
    x = x + noise * torch.randn(x.shape)
    return Split(x[train], classes[train], x[test], classes[test])


def batches(x: Tensor, y: Tensor, size: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches of equal size; what is left over of an epoch is left out."""
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(size):
            if len(part) == size:
                yield x[part], y[part]
