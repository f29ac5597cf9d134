"""Parts of a `Transformer` that experiments look at."""

from __future__ import annotations

from normkit.residual import FeedForward, Residual, Transformer


def ffn_branch(model: Transformer, layer: int) -> Residual:
    """The feed-forward branch of a layer, counted from 0; -1 is the last."""
    branch = model.stack.layers[layer].ffn
    assert isinstance(branch, Residual)
    return branch


def ffn(model: Transformer, layer: int) -> FeedForward:
    """The feed-forward sublayer of a layer."""
    found = ffn_branch(model, layer).sublayer
    assert isinstance(found, FeedForward)
    return found
