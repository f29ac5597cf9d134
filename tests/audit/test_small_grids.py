"""Norms over space on grids of few elements, where responses have few ranks to show."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import normkit
from normkit.audit import audit, identify


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (2, 2), (2, 3), (7, 7)])
def test_global_response_norm_on_any_grid(grid: tuple[int, int]) -> None:
    module = normkit.nn.GlobalResponseNorm(12)
    nn.init.normal_(module.weight)
    found = identify(module, torch.randn(2, *grid, 12))
    assert (found.kind, found.spec) == ("other", None), found.reason


def test_every_block_of_a_convnext_on_a_small_image() -> None:
    import transformers

    config = transformers.ConvNextV2Config(depths=[1, 2, 1, 2], hidden_sizes=[8, 16, 24, 32], image_size=64)
    model = transformers.ConvNextV2ForImageClassification(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    norms = audit(model, torch.randn(2, 3, 64, 64)).norms
    assert Counter((n.kind, n.placement) for n in norms if ".layers." in n.name) == {
        ("layer", "inner"): 6,
        ("other", "inner"): 6,
    }
