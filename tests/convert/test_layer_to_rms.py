"""layer_to_rms: what writes to a stream is centred, and its LayerNorms are RMSNorms; or refused."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn

import normkit
from normkit import Transformer
from normkit.convert.fold import center, fold, layer_to_rms
from normkit.spec import TORCH_LAYER
from tests.convert.check import Snapshot, check_exact, trained
from tests.zoo import build

IDS = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


def transformer(**fields):
    settings = {
        "vocab": 31,
        "dim": 24,
        "depth": 1,
        "heads": 4,
        "norm": TORCH_LAYER,
        "gated": False,
        "ffn_bias": True,
        "attention_bias": True,
    }
    return trained(Transformer(**{**settings, **fields})).eval()


def kinds(model, *args, **kwargs) -> list[str]:
    return [norm.kind for norm in normkit.audit(model, *args, **kwargs).norms]


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_models_with_pre_norms(name):
    entry = build(name)
    receipt = check_exact(partial(layer_to_rms, untie=True), entry.model, **entry.inputs)
    assert len(receipt.changed) == 5 and receipt.refused == ()
    assert kinds(entry.model, **entry.inputs) == ["rms"] * 5
    for change in receipt.changed:
        module = entry.model.get_submodule(change.name)
        assert module.weight.numel() == module.bias.numel() and module.weight.std() > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"tie_embeddings": False},
        {"tie_embeddings": False, "positions": "learned", "embedding_scale": 3.0, "kind": "encoder"},
        {"tie_embeddings": False, "placement": "parallel", "fuse": False},
        {"tie_embeddings": False, "placement": "scaled"},
    ],
    ids=["pre", "encoder", "parallel", "scaled"],
)
def test_normkits_own_transformer(fields):
    model = transformer(**fields)
    receipt = check_exact(layer_to_rms, model, IDS)
    assert receipt.refused == () and set(kinds(model, IDS)) == {"rms"}


def test_gains_fold_afterwards():
    model = transformer(tie_embeddings=False)
    check_exact(layer_to_rms, model, IDS)
    assert len(check_exact(fold, model, IDS).changed) == 3


def test_a_tied_head_is_refused_unless_untied():
    model = transformer()
    receipt = layer_to_rms(model, IDS)
    assert receipt.changed == () and all("untie=True" in refusal.reason for refusal in receipt.refused)
    receipt = check_exact(partial(layer_to_rms, untie=True), model, IDS)
    assert len(receipt.changed) == 3 and model.head.weight is not model.embed.weight


class Stream(nn.Module):
    """One pre-norm branch over an embedding, with something odd about the stream."""

    def __init__(self, use):
        super().__init__()
        self.embed, self.norm, self.up, self.down = (
            nn.Embedding(9, 12),
            nn.LayerNorm(12),
            nn.Linear(12, 20),
            nn.Linear(20, 12),
        )
        self.final, self.scale, self.use = nn.LayerNorm(12), nn.Parameter(torch.ones(12)), use

    def branch(self, x):
        return self.down(self.up(self.norm(x)).relu())

    def forward(self, ids):
        return self.use(self, self.embed(ids))


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda m, x: x + m.branch(x), "read elsewhere, without a norm"),
        (lambda m, x: (m.final(x), x), "returns its stream without a norm"),
        (lambda m, x: m.final(x + m.branch(x)) + x.tanh(), "read elsewhere, without a norm"),
        (lambda m, x: m.final(x + m.scale * m.branch(x)), "scaled, bent or moved|cannot be centred"),
        (lambda m, x: m.final(x + m.branch(x).roll(1, 0)), "cannot be centred"),
        (lambda m, x: m.final(x + m.branch(x).tanh()), "tanh .* cannot be centred"),
        (lambda m, x: m.final(x + m.branch(x)) @ m.embed.weight.T, "used elsewhere too"),
        (lambda m, x: m.final(x + m.branch(x)) + m.down(m.up(x[..., :12])), "read elsewhere"),
    ],
)  # fmt: skip
def test_what_keeps_a_stream_from_being_centred(use, reason):
    model = trained(Stream(use)).eval()
    snapshot = Snapshot(model)
    receipt = layer_to_rms(model, IDS % 9)
    assert receipt.changed == () and receipt.refused
    assert any(re.search(reason, refusal.reason) for refusal in receipt.refused), receipt.refused
    snapshot.assert_same()


def test_a_norm_behind_a_norm_stays_and_the_stream_is_converted():
    model = trained(Stream(lambda m, x: m.final(x + m.branch(m.final(x))))).eval()
    receipt = check_exact(layer_to_rms, model, IDS % 9)
    assert [c.name for c in receipt.changed] == ["final"] and [r.name for r in receipt.refused] == ["norm"]


def test_an_input_on_the_stream_and_post_norm():
    model = trained(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 4))).eval()
    assert "input 0 of the model is on its stream" in layer_to_rms(model, X).refused[0].reason
    post = transformer(placement="post", tie_embeddings=False)
    receipt = layer_to_rms(post, IDS)
    told = [refusal.reason for refusal in receipt.refused]
    assert receipt.changed == () and len(told) == 2, (
        "the first reads what its block reads too; the second reads the first"
    )
    assert "read elsewhere" in told[0] and "a norm's result cannot be centred" in told[1]


def test_a_wrong_centring_is_refused_by_the_proof(monkeypatch):
    """Only the first parameter centred: exact nowhere, and the model stays."""
    model = transformer(tie_embeddings=False)
    snapshot = Snapshot(model)
    right = center._edit
    monkeypatch.setattr(center, "_edit", lambda n, s, parameters: right(n, s, dict(list(parameters.items())[:1])))
    receipt = layer_to_rms(model, IDS)
    assert receipt.changed == () and all("the proof failed" in refusal.reason for refusal in receipt.refused)
    snapshot.assert_same()
