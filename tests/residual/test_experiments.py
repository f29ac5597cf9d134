"""What placements are published to do, at small scale and in seconds: gradients, stream growth, size of an update.

One position a sequence, so that attention is its value path and queries and keys play no part; relu feed-forward
layers without gate; Xavier, or the placement's own initialization.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normkit.residual import Stream, Transformer
from normkit.spec import TORCH_LAYER

DIM, VOCAB, BATCH = 64, 64, 64
DEPTHS = (8, 16, 32, 64)


def build(name: str, depth: int, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(
        vocab=VOCAB,
        dim=DIM,
        depth=depth,
        heads=1,
        ffn_dim=DIM,
        gated=False,
        act="relu",
        placement=name,
        norm=TORCH_LAYER,
        positions="none",
        tie_embeddings=False,
        embedding_std=1.0,
    )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    draw = lambda: torch.randint(0, VOCAB, (BATCH, 1), generator=generator)  # noqa: E731
    return draw(), draw()


def logits(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens) / math.sqrt(DIM)


def loss(model: Transformer) -> Tensor:
    tokens, targets = data()
    return torch.nn.functional.cross_entropy(logits(model, tokens)[:, 0], targets[:, 0])


def slope(xs, ys) -> float:
    """The exponent of y ~ x^slope, by least squares of the logarithms."""
    a, b = torch.tensor(xs, dtype=torch.float64).log(), torch.tensor(ys, dtype=torch.float64).log()
    return float(((a - a.mean()) * (b - b.mean())).sum() / (a - a.mean()).pow(2).sum())


def last_ffn_gradient(name: str, depth: int) -> float:
    """Mean norm over single samples: over a batch, gradients of samples that grow alike with depth would add up."""
    found = []
    tokens, targets = data()
    for seed in range(2):
        model = build(name, depth, seed)
        weight = model.stack.layers[-1].ffn.sublayer.down.weight
        for n in range(8):
            scores = logits(model, tokens[n : n + 1])[:, 0]
            (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(scores, targets[n]), weight)
            found.append(gradient.norm().item())
    return sum(found) / len(found)


def test_last_gradient_is_flat_for_post_and_falls_as_the_root_for_pre():
    """Xiong et al. 2020: at initialization O(1) in depth for Post-LN, O(1 / sqrt(L)) for Pre-LN."""
    found = {name: slope(DEPTHS, [last_ffn_gradient(name, n) for n in DEPTHS]) for name in ("post", "pre")}
    assert abs(found["post"]) < 0.15
    assert -0.6 < found["pre"] < -0.4


@torch.no_grad()
def stream_sizes(name: str, depth: int = 32) -> list[float]:
    """Mean square of the stream behind each layer."""
    model = build(name, depth)
    stream, sizes = Stream(model.embed(data()[0])), []
    for layer in model.stack.layers:
        stream, _ = layer.attention.step(stream)
        stream, _ = layer.ffn.step(stream)
        sizes.append(stream.settle().pow(2).mean().item())
    return sizes


def r_squared(ys) -> float:
    """How much of the variance of y a straight line in the layer's number takes up."""
    y = torch.tensor(ys, dtype=torch.float64)
    x = torch.arange(len(ys), dtype=torch.float64)
    return float(torch.corrcoef(torch.stack((x, y)))[0, 1] ** 2)


@pytest.mark.parametrize("name", ["pre", "sandwich", "output"])
def test_stream_grows_linearly(name):
    sizes = stream_sizes(name)
    assert r_squared(sizes) > 0.98
    assert sizes[-1] > 8 * sizes[0]


@pytest.mark.parametrize("name", ["post", "deepnorm", "resi_dual"])
def test_stream_is_flat(name):
    sizes = stream_sizes(name)
    assert max(sizes) / min(sizes) < 1.01


def test_scaled_stream_grows_slower_than_pre():
    """LayerNorm Scaling: the variance grows as the sum of 1 / layer, a logarithm."""
    pre, scaled = stream_sizes("pre"), stream_sizes("scaled")
    assert scaled[-1] < pre[-1] / 4
    assert scaled[-1] - scaled[15] < 0.4 * (scaled[15] - scaled[0])


def update_size(name: str, depth: int) -> float:
    """The change of the output in one Adam step of 1e-5, in the linear regime."""
    model = build(name, depth).double()
    tokens, _ = data()
    with torch.no_grad():
        before = logits(model, tokens)
    optimizer = torch.optim.Adam(model.stack.parameters(), lr=1e-5)
    loss(model).backward()
    optimizer.step()
    with torch.no_grad():
        return (logits(model, tokens) - before).norm().item()


def test_deepnorm_bounds_the_update():
    """Wang et al. 2022: the update of Post-LN explodes with depth, DeepNorm's does not."""
    sizes = {name: [update_size(name, n) for n in DEPTHS] for name in ("post", "pre", "deepnorm")}
    slopes = {name: slope(DEPTHS, found) for name, found in sizes.items()}
    assert slopes["post"] > 1
    assert slopes["deepnorm"] < 0.8
    assert slopes["deepnorm"] < slopes["post"] - 0.4
    assert sizes["post"][-1] > 10 * sizes["deepnorm"][-1]


@pytest.mark.parametrize("name", ["rezero", "skipinit", "fixup"])
def test_norm_free_branches_start_as_the_identity(name):
    model = build(name, 64)
    x = model.embed(data()[0])
    assert torch.equal(model.stack(x), x)


@pytest.mark.parametrize("name", ["fixup", "deepnorm", pytest.param("rezero", marks=pytest.mark.slow)])
def test_64_layers_train(name):
    """Twenty steps take a 64-layer model below its first loss, without warm-up."""
    model = build(name, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        value = loss(model)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.7 * losses[0]
