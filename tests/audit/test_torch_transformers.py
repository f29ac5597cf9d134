"""torch's own Transformer layers, labelled by reading torch/nn/modules/transformer.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normkit.audit import Audit, audit

WIDTH, HEADS, LAYERS, EPS = 16, 2, 3, 3e-5


def options(norm_first: bool, batch_first: bool, **more: Any) -> dict[str, Any]:
    return {
        "d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 24, "layer_norm_eps": EPS,
        "norm_first": norm_first, "batch_first": batch_first, **more,
    }  # fmt: skip


def encoder(final: bool, norm_first: bool, **more: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(**options(norm_first, **more))
    return nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH, eps=EPS) if final else None)


def decoder(final: bool, norm_first: bool, **more: Any) -> nn.TransformerDecoder:
    layer = nn.TransformerDecoderLayer(**options(norm_first, **more))
    return nn.TransformerDecoder(layer, LAYERS, nn.LayerNorm(WIDTH, eps=EPS) if final else None)


def places(result: Audit) -> dict[str, str]:
    assert all(n.kind == "layer" and n.spec is not None and n.spec.centered for n in result.norms)
    assert all(n.spec is not None and n.spec.eps == pytest.approx(EPS, rel=0.02) for n in result.norms)
    return {n.name: n.placement for n in result.norms}


def labels(lead: str, norms: int, norm_first: bool, final: bool) -> dict[str, str]:
    """What the code says: before each sublayer, or after each sum; and one norm behind the last layer."""
    each = "pre" if norm_first else "post"
    found = {f"{lead}layers.{i}.norm{k + 1}": each for i in range(LAYERS) for k in range(norms)}
    return found | ({f"{lead}norm": "final"} if final else {})


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoder(norm_first: bool, batch_first: bool, final: bool, training: bool) -> None:
    model = encoder(final, norm_first, batch_first=batch_first).train(training)
    result = audit(model, torch.randn(2, 5, WIDTH))
    assert places(result) == labels("", 2, norm_first, final)
    assert [b.placement for b in result.branches] == ["pre" if norm_first else "post"] * (2 * LAYERS)
    ends = {f.rule for f in result.findings} & {"missing-final-norm", "double-final-norm"}
    assert ends == {(True, False): {"missing-final-norm"}, (False, True): {"double-final-norm"}}.get(
        (norm_first, final), set()
    )


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("final", [True, False])
def test_decoder(norm_first: bool, batch_first: bool, final: bool) -> None:
    model = decoder(final, norm_first, batch_first=batch_first).eval()
    result = audit(model, torch.randn(4, 4, WIDTH), torch.randn(4, 4, WIDTH))
    assert places(result) == labels("", 3, norm_first, final)
    assert [b.placement for b in result.branches] == ["pre" if norm_first else "post"] * (3 * LAYERS)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_both(norm_first: bool, batch_first: bool, device: str) -> None:
    depth = {"num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS, "device": device}
    model = nn.Transformer(**options(norm_first, batch_first, **depth)).eval()
    source, target = torch.randn(4, 4, WIDTH, device=device), torch.randn(4, 4, WIDTH, device=device)
    result = audit(model, source, target)
    expected = labels("encoder.", 2, norm_first, True) | labels("decoder.", 3, norm_first, True)
    assert places(result) == expected


def test_a_layer_alone_and_one_without_biases() -> None:
    for norm_first, place in ((True, "pre"), (False, "post")):
        layer = nn.TransformerEncoderLayer(**options(norm_first, True, bias=False)).eval()
        result = audit(layer, torch.randn(2, 5, WIDTH))
        assert [(n.name, n.placement) for n in result.norms] == [("norm1", place), ("norm2", place)]
        assert all(n.spec is not None and n.spec.has_weight and not n.spec.has_bias for n in result.norms)


# ---- the fast path: one operator for a whole layer, norms included ----


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def fuses(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> bool:
    with torch.inference_mode(), _Names() as names:
        model(*args, **kwargs)
    return any(re.search("_transformer_encoder_layer_fwd", name) for name in names.seen)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_the_fast_path_hides_no_norm(norm_first: bool, padded: bool) -> None:
    model = encoder(True, norm_first, batch_first=True).eval()
    x = torch.randn(2, 6, WIDTH)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    given = {"src_key_padding_mask": mask} if padded else {}
    enabled = torch.backends.mha.get_fastpath_enabled()
    with torch.inference_mode():
        result = audit(model, x, **given)
    assert fuses(model, x, **given)  # outside the audit it is taken
    assert places(result) == labels("", 2, norm_first, True)
    assert torch.backends.mha.get_fastpath_enabled() == enabled
