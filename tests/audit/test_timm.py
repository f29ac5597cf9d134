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
    "efficientnet": (  # stages of two blocks; every norm but a block's last holds its activation, two stages gate
        ("test_efficientnet", {"depth_multiplier": 2.0, "channel_multiplier": 0.5}, 32),
        {
            r"bn1": ("batch", "conv", 1e-5, 1),
            r"blocks\.0\.\d\.bn1": ("batch", "conv", 1e-5, 2),
            r"blocks\.[12]\.\d\.bn[12]": ("batch", "conv", 1e-5, 8),
            r"blocks\.[34]\.\d\.bn[123]": ("batch", "conv", 1e-5, 12),
            r"bn2": ("batch", "conv", 1e-5, 1),
        },
    ),
    "efficientnet with group norms": (
        ("test_efficientnet_gn", {"channel_multiplier": 0.5}, 32),
        {r"(blocks\..*\.)?bn\d": ("group", "conv", 1e-5, 13)},
    ),
    "efficientnet with layer norms": (
        ("test_efficientnet_ln", {"channel_multiplier": 0.5}, 32),
        {r"(blocks\..*\.)?bn\d": ("layer", "conv", 1e-5, 13)},
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
            assert norm.spec is not None, f"{norm.name}: {norm.reason}"
            assert (norm.kind, norm.placement) == (kind, placement), norm.name
            assert norm.spec.eps == pytest.approx(eps, rel=0.02), norm.name
    assert left == {}


def test_fused_activations_and_gates_are_no_part_of_a_norm() -> None:
    """EfficientNet: SiLU runs inside most norm modules; squeeze-and-excitation holds no norm and ends no branch."""
    model = create("test_efficientnet", depth_multiplier=2.0, channel_multiplier=0.5)
    result = audit(model, torch.randn(2, 3, 32, 32))
    fused = {n.name for n in result.norms if "More operators follow" in n.reason}
    last = {f"blocks.{s}.{i}.{'bn3' if s > 2 else 'bn2'}" for s in (1, 2, 3, 4) for i in (0, 1)}
    assert fused == {n.name for n in result.norms} - last
    assert [re.match(r"blocks\.\d\.\d", b.name)[0] for b in result.branches] == [f"blocks.{s}.1" for s in range(5)]


# alpha is 0.2 in every config; dm_nfnet has a learned gain on each branch besides, starting at 0.
@pytest.mark.parametrize(("name", "skipinit"), [("nf_resnet26", False), ("nf_regnet_b0", False), ("dm_nfnet_f0", True)])
def test_nfnet_normalizes_weights_alone(name: str, skipinit: bool) -> None:
    small = {"depths": (1, 2, 1, 2), "channels": (32, 48, 64, 64)}
    small |= {"stem_chs": 32, "group_size": 16} if name.startswith("dm") else {}
    model = create(name, **small)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 0 or (parameter == 0).all():  # skipinit, and the last convolution's gain
                parameter.fill_(0.3)
    result = audit(model, torch.randn(2, 3, 64, 64))
    convolutions = {n for n, m in model.named_modules() if "StdConv" in type(m).__name__}
    assert {n.name.removesuffix("#0") for n in result.norms} == convolutions
    for norm in result.norms:
        assert (norm.kind, norm.placement, norm.functional) == ("other", "conv", True), norm.name
        assert norm.reason.startswith("weight normalization")
    assert len(result.branches) == 6
    for branch in result.branches:
        assert branch.slots == {}
        assert branch.branch_scale == "scalar" if skipinit else branch.branch_scale == pytest.approx(0.2)
    assert "missing-final-norm" not in [f.rule for f in result.findings]
