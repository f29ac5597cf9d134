"""Convolutional networks: every batch norm is one of convolutions, whatever it stands before or behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.audit import audit

from .cnn_models import VGG, DenseNet, MobileNet, ResNet

MODELS = {"resnet": ResNet, "vgg": VGG, "densenet": DenseNet, "mobilenet": MobileNet}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_batch_norm_is_found_and_placed(name: str, training: bool, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[name]().train(training)
    result = audit(model, torch.randn(4, 3, 32, 32, device=device))
    expected = {n: m.eps for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert {n.name for n in result.norms} == set(expected)
    for norm in result.norms:
        assert (norm.kind, norm.placement, norm.calls) == ("batch", "conv", 1), norm.name
        assert norm.spec is not None
        assert norm.spec.eps == pytest.approx(expected[norm.name], rel=0.02)
        assert norm.batch_statistics == training
    assert result.unreached == ()
    assert [f for f in result.findings if f.rule in ("missing-final-norm", "double-final-norm")] == []


@pytest.mark.parametrize(("name", "count"), [("resnet", 6), ("vgg", 0), ("densenet", 0), ("mobilenet", 2)])
def test_residual_branches(name: str, count: int) -> None:
    """ResNet's six blocks, two of them with a projection shortcut; MobileNet's two that keep their shape."""
    torch.manual_seed(0)
    assert len(audit(MODELS[name]().eval(), torch.randn(2, 3, 32, 32)).branches) == count
