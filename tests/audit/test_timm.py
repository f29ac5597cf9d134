"""timm models, labelled by reading their code."""

from __future__ import annotations

import re

import pytest
import torch

from normkit.audit import audit

from .timm_models import create

# name, options, image size -> pattern of the norms: (kind, placement, eps, how many)
CASES = {
    "vit": (
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}, 32),
        {r"blocks\.\d\.norm\d": ("layer", "pre", 1e-6, 4), r"norm": ("layer", "final", 1e-6, 1)},
    ),
    "convnext": (
        ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}, 64),
        {
            r"stem\.\d": ("layer", "conv", 1e-6, 1),
            r"stages\.\d\.blocks\.\d\.norm": ("layer", "conv", 1e-6, 5),
            r"stages\.\d\.downsample\.0": ("layer", "conv", 1e-6, 3),
            r"head\.norm": ("layer", "final", 1e-6, 1),
        },
    ),
    "resnet": (
        ("resnet10t", {}, 64),
        {
            r"conv1\.\d|bn1": ("batch", "conv", 1e-5, 3),
            r"layer\d\.0\.bn\d": ("batch", "conv", 1e-5, 8),
            r"layer\d\.0\.downsample\.\d": ("batch", "conv", 1e-5, 3),
        },
    ),
    "swin": (
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 56, "depths": (2, 2), "embed_dim": 16, "num_heads": (2, 2), "window_size": 7},
            56,
        ),
        {
            r"patch_embed\.norm": ("layer", "embedding", 1e-5, 1),
            r"layers\.\d\.blocks\.\d\.norm\d": ("layer", "pre", 1e-5, 8),
            r"layers\.1\.downsample\.norm": ("layer", "embedding", 1e-5, 1),
            r"norm": ("layer", "final", 1e-5, 1),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_norms(name: str) -> None:
    (model_name, options, size), labels = CASES[name]
    result = audit(create(model_name, **options), torch.randn(2, 3, size, size))
    left = {n.name: n for n in result.norms}
    for pattern, (kind, placement, eps, count) in labels.items():
        found = [left.pop(n) for n in list(left) if re.fullmatch(pattern, n)]
        assert len(found) == count, pattern
        for norm in found:
            assert norm.spec is not None
            assert (norm.kind, norm.placement) == (kind, placement), norm.name
            assert norm.spec.eps == pytest.approx(eps, rel=0.02), norm.name
    assert left == {}
