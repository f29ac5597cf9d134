"""Convolutional networks in the manner of torchvision's: ResNet, VGG with batch norms, DenseNet, MobileNet V2."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def conv_norm(
    enter: int, leave: int, kernel: int, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    """Convolution, BatchNorm, and mostly an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(enter, leave, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(leave, eps=1e-3)
    ]  # fmt: skip
    return nn.Sequential(*layers, *([nn.ReLU6(inplace=True)] if relu else []))


class BasicBlock(nn.Module):
    """Two convolutions, each followed by its norm; the sum is activated."""

    def __init__(self, enter: int, leave: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(enter, leave, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(leave)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(leave, leave, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(leave)
        self.downsample = None
        if stride > 1 or enter != leave:
            self.downsample = nn.Sequential(nn.Conv2d(enter, leave, 1, stride, bias=False), nn.BatchNorm2d(leave))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, three stages of two blocks, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        widths = (8, 8, 16, 24)
        self.layers = nn.Sequential(*(
            nn.Sequential(BasicBlock(a, b, 1 if a == b else 2), BasicBlock(b, b, 1))
            for a, b in itertools.pairwise(widths)
        ))  # fmt: skip
        self.fc = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class VGG(nn.Module):
    """Convolutions with norms in one row, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for enter, leave in ((3, 8), (8, 12), (12, 16)):
            layers += [
                nn.Conv2d(enter, leave, 3, padding=1),
                nn.BatchNorm2d(leave),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(16 * 16, 20), nn.ReLU(True), nn.Dropout(), nn.Linear(20, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(nn.functional.adaptive_avg_pool2d(self.features(x), 4), 1))


class DenseLayer(nn.Module):
    """Norm, activation, convolution, twice, of all that came before."""

    def __init__(self, enter: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(enter), nn.Conv2d(enter, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        return self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())


class DenseBlock(nn.Module):
    """Layers that each read the outputs of all before."""

    def __init__(self, enter: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(enter + i * growth, growth) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Two dense blocks with a transition between, and a norm before the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.norm0 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.block1 = DenseBlock(8, 4, 3)
        self.transition_norm, self.transition_conv = nn.BatchNorm2d(20), nn.Conv2d(20, 10, 1, bias=False)
        self.block2 = DenseBlock(10, 4, 3)
        self.norm5 = nn.BatchNorm2d(22)
        self.classifier = nn.Linear(22, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm0(self.conv0(x)).relu(), 3, 2, 1)
        x = self.transition_conv(self.transition_norm(self.block1(x)).relu())
        x = self.norm5(self.block2(nn.functional.avg_pool2d(x, 2))).relu()
        return self.classifier(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class InvertedResidual(nn.Module):
    """Widen, convolve each channel, narrow without an activation; a sum where the shapes allow it."""

    def __init__(self, enter: int, leave: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = enter * expand
        self.conv = nn.Sequential(
            conv_norm(enter, inner, 1),
            conv_norm(inner, inner, 3, stride, inner),
            conv_norm(inner, leave, 1, relu=False),
        )
        self.adds = stride == 1 and enter == leave

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNet(nn.Module):
    """Inverted residuals, then a wide 1x1 convolution before the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv_norm(3, 8, 3, 2), InvertedResidual(8, 12, 1, 3), InvertedResidual(12, 12, 1, 3),
            InvertedResidual(12, 16, 2, 3), InvertedResidual(16, 16, 1, 3), conv_norm(16, 40, 1),
        )  # fmt: skip
        self.classifier = nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))
