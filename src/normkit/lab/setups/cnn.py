"""A small convolutional network on the digits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

import normkit.nn as norms
from normkit.lab.setups.digits import batches, digits
from normkit.lab.setups.training import accuracy, classification, train


def cnn(norm: Literal["batch", "group"], width: int = 16, groups: int = 4) -> nn.Sequential:
    """Four times convolution, norm, ReLU, the second and fourth with stride 2; then pooling and scores."""
    layers: list[nn.Module] = []
    for n in range(4):
        layers += [
            nn.Conv2d(1 if n == 0 else width, width, 3, stride=1 + n % 2, padding=1, bias=False),
            norms.BatchNorm2d(width) if norm == "batch" else norms.GroupNorm(groups, width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def digits_error(
    norm: Literal["batch", "group"],
    *,
    batch: int,
    epochs: int,
    rate: float = 0.05,
    noise: float = 0.3,
    samples: int | None = None,
) -> float:
    """The test error in per cent after SGD with a rate of ``rate * batch / 32``, falling to 0 along a cosine."""
    data = digits(noise)
    x, y = data.train_x[:samples], data.train_y[:samples]
    model = cnn(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * batch / 32, momentum=0.9)
    steps = epochs * (len(x) // batch)
    train(classification(model, batches(x, y, batch, epochs)), optimizer, cosine=steps)
    model.eval()
    return 100 * (1 - accuracy(model, data.test_x, data.test_y))
