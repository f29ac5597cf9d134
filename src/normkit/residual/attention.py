"""Attention and feed-forward sublayers of the reference Transformer, with their caches, masks and rotary positions.

Letters: B batch, T queries, S keys, C features, H heads, K key and value heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as tf

from normkit.residual.roles import Roles, attention_roles, mlp_roles

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": tf.silu,
    "gelu": tf.gelu,
    "gelu_tanh": lambda x: tf.gelu(x, approximate="tanh"),
    "relu": tf.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name; ValueError names the known ones."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, get_args(Activation)))}; got {name!r}")
    return _ACTIVATIONS[name]


@dataclass
class KeyValueCache:
    """Keys and values of the positions seen so far, one pair a layer, and an encoder's output."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None

    @property
    def length(self) -> int:
        """How many positions are stored."""
        return next((k.shape[-2] for k in self.keys.values()), 0)

    @property
    def batch(self) -> int:
        """How many samples are stored."""
        return next((k.shape[0] for k in self.keys.values()), 0)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``(B, K, T, D)`` and return all positions."""
        if layer in self.keys:
            key = torch.cat((self.keys[layer], key), dim=-2)
            value = torch.cat((self.values[layer], value), dim=-2)
        self.keys[layer], self.values[layer] = key, value
        return key, value


def rotary_table(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) of rotary positions (Su et al. 2021, arXiv:2104.09864), each ``(T, dim)``, halves repeated."""
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions.to(torch.float32)[:, None] * frequency  # (T, dim / 2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to ``(B, H, T, D)``."""
    cos, sin = (t.to(x.dtype) for t in table)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def allowed(
    queries: int, keys: int, *, causal: bool, window: int | None, valid: Tensor | None, device: torch.device
) -> Tensor | None:
    """Which key each query may see, ``(B or 1, 1, T, S)``; None where all may, or where causality alone decides.

    The last query stands at the last key. With ``window`` w a query sees itself and the w - 1 positions before it.
    """
    mask = None
    bounded = window is not None and window < keys
    if (causal and queries > 1 and (bounded or valid is not None or queries != keys)) or bounded:
        mask = _lower(queries, keys, device) if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
        if bounded:
            assert window is not None
            q = torch.arange(keys - queries, keys, device=device)[:, None]
            k = torch.arange(keys, device=device)[None, :]
            mask = mask & (q - k < window) & (k - q < window)
        mask = mask[None, None]
    if valid is None:
        return mask
    padding = valid.to(torch.bool)[:, None, None, :]
    return padding if mask is None else mask & padding


def _lower(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which key each query may see under causality, ``(T, S)``; the last query stands at the last key."""
    return torch.arange(keys, device=device)[None, :] <= torch.arange(keys - queries, keys, device=device)[:, None]


class Attention(nn.Module):
    """Scaled dot-product attention with grouped key and value heads.

    ``softmax(cap(scale * q k^T) + mask) v``, then the output projection; ``cap(s) = softcap * tanh(s / softcap)``.

    Args:
        dim: C.
        heads: H.
        kv_heads: K, which divides H (grouped-query attention; 1 is multi-query).
        head_dim: D, by default C / H.
        bias: whether queries, keys and values have a bias.
        output_bias: whether the output projection has one; as ``bias`` by default.
        scale: D^(-1/2) by default.
        softcap: a bound on the scores before the mask (Gemma 2).
        dropout: on the attention weights.
        qk_norm: None; ``"head"``: queries and keys are normalized within each head (Qwen 3); ``"full"``: over all
            heads at once, before they are cut apart (OLMo 2).
        make_norm: makes those norms from their number of features.
        layer: this layer's number, its key in the cache; needed where a cache is given.

    Shape:
        ``(B, T, C)`` in and out.

    Raises:
        ValueError: heads that do not divide; at the call, a cache without ``layer``.
        TypeError: a floating point mask at the call.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        qk_norm: Literal["head", "full"] | None = None,
        make_norm: Callable[[int], nn.Module] | None = None,
        layer: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"heads={heads} does not divide dim={dim}; give head_dim")
        if qk_norm not in (None, "head", "full"):
            raise ValueError(f"qk_norm must be None, 'head' or 'full'; got {qk_norm!r}")
        if qk_norm is not None and make_norm is None:
            raise ValueError(f"qk_norm={qk_norm!r} needs make_norm, a function of the number of features")
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.softcap, self.dropout, self.layer = softcap, dropout, layer
        self.full_width = qk_norm == "full"
        output_bias = bias if output_bias is None else output_bias

        def linear(features_in: int, features_out: int, with_bias: bool) -> nn.Linear:
            return nn.Linear(features_in, features_out, bias=with_bias, device=device, dtype=dtype)

        wide, narrow = heads * self.head_dim, kv_heads * self.head_dim
        self.query = linear(dim, wide, bias)
        self.key = linear(dim, narrow, bias)
        self.value = linear(dim, narrow, bias)
        self.output = linear(wide, dim, output_bias)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        self.value_norm: nn.Module | None = None
        self.inner_norm: nn.Module | None = None
        self.head_scale: nn.Parameter | None
        self.register_parameter("head_scale", None)
        if make_norm is not None and qk_norm is not None:
            self.query_norm = make_norm(wide if self.full_width else self.head_dim)
            self.key_norm = make_norm(narrow if self.full_width else self.head_dim)

    def matrix_roles(self) -> Roles:
        """The roles of the four projections."""
        return attention_roles("query", "key", "value", "output")

    def adapt(self, wanted: Sequence[str], make_norm: Callable[[int], nn.Module]) -> None:
        """Take in what a placement puts inside the branch: ``"inner"``, ``"qkv"`` or ``"head_scale"``.

        What an earlier call put in stays, so that one module may serve in several branches.
        """
        if "inner" in wanted and self.inner_norm is None:
            self.inner_norm = make_norm(self.heads * self.head_dim)
        if "qkv" in wanted and self.value_norm is None:
            self.full_width = False
            self.query_norm, self.key_norm = make_norm(self.head_dim), make_norm(self.head_dim)
            self.value_norm = make_norm(self.head_dim)
        if "head_scale" in wanted and self.head_scale is None:
            ones = torch.ones(self.heads, device=self.query.weight.device, dtype=self.query.weight.dtype)
            self.head_scale = nn.Parameter(ones)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: ``(B, T, C)``.
            memory: ``(B, S, C)`` for cross-attention; x itself by default.
            mask: True (or 1) where a query may see a key, broadcast to ``(B, H, T, S)``.
            causal: a position sees no later ones, whatever the mask says. The last query stands at the last key.
            rotary: the table of x's positions, from `rotary_table`.
            cache: keys and values of earlier positions, extended in place.
        """
        source = x if memory is None else memory
        q, k, v = self.query(x), self.key(source), self.value(source)
        if self.full_width and self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (self._heads(t, n) for t, n in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads)))
        if not self.full_width and self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.value_norm is not None:
            v = self.value_norm(v)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None and memory is None:
            if self.layer is None:
                raise ValueError("a cache needs to know the layers apart: give each Attention its layer=, a number")
            k, v = cache.extend(self.layer, k, v)
        y = self._attend(q, k, v, mask, causal)  # (B, H, T, D)
        if self.head_scale is not None:
            y = y * self.head_scale.to(y.dtype)[:, None, None]
        y = y.transpose(1, 2).flatten(2)  # (B, T, H * D)
        if self.inner_norm is not None:
            y = self.inner_norm(y)
        return self.output(y)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, self.head_dim)).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if mask is not None and mask.is_floating_point():
            raise TypeError(f"mask must be True or 1 where a query may see a key; got {mask.dtype}")
        mask = None if mask is None else mask.to(torch.bool)
        alone = False  # whether causality is all there is, in the square form that torch has a flag for
        if causal and q.shape[-2] > 1:
            if mask is None and q.shape[-2] == k.shape[-2] and self.softcap is None:
                alone = True
            else:
                before = _lower(q.shape[-2], k.shape[-2], q.device)
                mask = before if mask is None else mask & before
        grouped = self.kv_heads != self.heads
        if self.softcap is None:
            return tf.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=alone, scale=self.scale, enable_gqa=grouped
            )
        if grouped:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            # A finite bound: a padded query that sees nothing gets an average, not NaN that would spread.
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
        return tf.dropout(weights, dropout) @ v


class FeedForward(nn.Module):
    """Two projections around an activation: ``down(act(up(x)))``, gated: ``down(act(gate(x)) * up(x))``.

    Args:
        dim: C.
        hidden: the width between them.
        gated: whether a third projection gates (GLU variants, Shazeer 2020, arXiv:2002.05202).
        act: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        bias: whether the projections have biases.

    Shape:
        ``(B, T, C)`` in and out.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        gated: bool = True,
        act: Activation = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.act = act
        activation(act)
        self.up = nn.Linear(dim, hidden, bias=bias, device=device, dtype=dtype)
        self.gate = nn.Linear(dim, hidden, bias=bias, device=device, dtype=dtype) if gated else None
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)
        self.inner_norm: nn.Module | None = None

    def matrix_roles(self) -> Roles:
        """The roles of the projections."""
        return mlp_roles("up", "down", gate=None if self.gate is None else "gate")

    def adapt(self, wanted: Sequence[str], make_norm: Callable[[int], nn.Module]) -> None:
        """Take in an inner norm; QKV-norm and head factors have no meaning here."""
        if "inner" in wanted and self.inner_norm is None:
            self.inner_norm = make_norm(self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        act = activation(self.act)
        h = act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)
        if self.inner_norm is not None:
            h = self.inner_norm(h)
        return self.down(h)
