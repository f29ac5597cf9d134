"""Transformer: a small reference decoder, encoder and encoder-decoder, for any norm and any residual placement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from normkit.nn import build
from normkit.placement import Placement, Schedule, Sublayer, schedule
from normkit.residual.attention import (
    Activation,
    Attention,
    FeedForward,
    KeyValueCache,
    activation,
    allowed,
    rotary_table,
)
from normkit.residual.branch import Residual
from normkit.residual.init import Base, check_base, initialize_branch
from normkit.residual.stream import FusingModule, Stream, finish
from normkit.spec import NormSpec

Kind = Literal["decoder", "encoder", "encoder_decoder"]
Positions = Literal["rotary", "learned", "none"]
_RMS = NormSpec(centered=False, eps=1e-6)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Everything that defines a `Transformer`.

    Args:
        vocab: the number of tokens V.
        dim: the width C.
        depth: the number of layers (of the decoder, in a pair).
        heads, kv_heads, head_dim: see `Attention`.
        kind: ``"decoder"`` (causal), ``"encoder"`` or ``"encoder_decoder"``.
        encoder_depth: the encoder's layers in a pair; ``depth`` by default.
        placement: a name of `normkit.PLACEMENTS` or `normkit.SCHEDULES`, or a `normkit.Placement` for every branch.
        norm: the spec of every norm over the stream.
        final_norm: whether a norm ends the stack; by default as the placement says.
        embedding_norm: whether a norm follows the embeddings.
        qk_norm: None, ``"head"`` or ``"full"``; see `Attention`.
        ffn_dim: the hidden width, 4 C by default.
        gated, act: see `FeedForward`.
        attention_bias, output_bias, ffn_bias, head_bias: which projections have biases.
        positions: ``"rotary"``, ``"learned"`` or ``"none"``; rotary with base ``rope_theta``.
        max_positions: how many learned positions there are.
        token_types: how many segment embeddings there are (BERT).
        embedding_scale: a factor on the token embeddings, rounded to their dtype (Gemma).
        attention_scale, attention_softcap: see `Attention`.
        logit_softcap: a bound on the logits: ``cap * tanh(logits / cap)``.
        windows: sliding windows, one a layer in turn; None is full attention.
        head_transform: a projection, an activation and a norm before the head (BERT).
        tie_embeddings: whether the head is the embedding matrix.
        shared_norm: see `Residual`.
        dropout, drop_path: on every branch; see `Residual`.
        stream_dtype, fuse: see `Residual`.
        base: the distribution of the branches' matrices before the placement's gain; see `init_for`.
        embedding_std: the standard deviation of embeddings and head.

    Raises:
        ValueError: a field outside its domain.
        TypeError: a norm that is no spec.
    """

    vocab: int
    dim: int
    depth: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    kind: Kind = "decoder"
    encoder_depth: int | None = None
    placement: str | Placement = "pre"
    norm: NormSpec = _RMS
    final_norm: bool | None = None
    embedding_norm: bool = False
    qk_norm: Literal["head", "full"] | None = None
    ffn_dim: int | None = None
    gated: bool = True
    act: Activation = "silu"
    attention_bias: bool = False
    output_bias: bool | None = None
    ffn_bias: bool = False
    head_bias: bool = False
    positions: Positions = "rotary"
    rope_theta: float = 10000.0
    max_positions: int = 2048
    token_types: int = 0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] = (None,)
    head_transform: bool = False
    tie_embeddings: bool = True
    shared_norm: bool = True
    dropout: float = 0.0
    drop_path: float = 0.0
    stream_dtype: torch.dtype | None = None
    fuse: bool = True
    base: Base = "xavier_normal"
    embedding_std: float = 0.02

    def __post_init__(self) -> None:
        self._check_numbers()
        check_base(self.base)
        if not isinstance(self.norm, NormSpec):
            raise TypeError(f"norm must be a NormSpec; got {type(self.norm).__name__}")
        if self.norm.axes != "features" or self.norm.channel_dim != -1:
            raise ValueError(
                f"norm must be over the last dim of each token (axes='features', channel_dim=-1); "
                f"got axes={self.norm.axes!r}, channel_dim={self.norm.channel_dim!r}"
            )
        for name, choices in (("kind", get_args(Kind)), ("positions", get_args(Positions))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {getattr(self, name)!r}")
        if self.encoder_depth is not None and self.kind != "encoder_decoder":
            raise ValueError(f"encoder_depth={self.encoder_depth} needs kind='encoder_decoder'; got {self.kind!r}")
        listed = isinstance(self.windows, tuple | list) and len(self.windows) > 0
        if not listed or any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows must hold None or sizes >= 1; got {self.windows!r}")
        if self.final_norm is False and self.schedule().second_stream:
            raise ValueError(f"placement {self.placement!r} ends in a norm of its second stream: leave final_norm away")
        size = self.dim // self.heads if self.head_dim is None else self.head_dim
        if self.positions == "rotary" and size % 2:
            raise ValueError(f"head_dim={size} must be even for rotary positions")

    def _check_numbers(self) -> None:
        whole = ("vocab", "dim", "depth", "heads", "max_positions")
        optional = ("kv_heads", "head_dim", "ffn_dim", "encoder_depth")
        for name in (*whole, *optional, "token_types"):
            value, low = getattr(self, name), 0 if name == "token_types" else 1
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} must be an integer >= {low}; got {value!r}")
        positive = ("rope_theta", "attention_softcap", "logit_softcap", "attention_scale")
        for name in (*positive, "embedding_std"):
            value = getattr(self, name)
            if value is None and name in positive:
                continue
            if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
                raise ValueError(f"{name} must be a finite number {'>' if name in positive else '>='} 0; got {value!r}")

    def schedule(self, *, encoder: bool = False) -> Schedule:
        """The placements of the decoder's (or only) stack, or of a pair's encoder."""
        if self.kind != "encoder_decoder":
            return schedule(self.placement, self.depth, stack="encoder" if self.kind == "encoder" else "decoder")
        sizes = (self.encoder_depth or self.depth, self.depth)
        if encoder:
            return schedule(self.placement, sizes[0], other_depth=sizes[1], stack="encoder_of_pair")
        return schedule(self.placement, sizes[1], other_depth=sizes[0], stack="decoder_of_pair")


class TransformerLayer(nn.Module):
    """Attention, cross-attention (in a pair's decoder) and feed-forward layer, each a `Residual`; stream to stream."""

    def __init__(
        self, config: TransformerConfig, plan: Schedule, number: int, make: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        c = config
        self.window = c.windows[(number - 1) % len(c.windows)]

        def attention() -> Attention:
            return Attention(
                c.dim,
                c.heads,
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                bias=c.attention_bias,
                output_bias=c.output_bias,
                scale=c.attention_scale,
                softcap=c.attention_softcap,
                qk_norm=c.qk_norm,
                make_norm=make,
                layer=number - 1,
            )

        def branch(sublayer: nn.Module, kind: Sublayer, parallel: nn.Module | None = None) -> Residual:
            return Residual(
                sublayer,
                plan.branch(number, kind),
                c.dim,
                norm=c.norm,
                parallel=parallel,
                shared_norm=c.shared_norm,
                kind=kind,
                dropout=c.dropout,
                drop_path=c.drop_path,
                stream_dtype=c.stream_dtype,
                fuse=c.fuse,
            )

        ffn = FeedForward(c.dim, c.ffn_dim or 4 * c.dim, gated=c.gated, act=c.act, bias=c.ffn_bias)
        self.attention = branch(attention(), "attention", ffn if plan.parallel else None)
        crossed = plan.stack == "decoder_of_pair"
        self.cross = branch(attention(), "cross_attention") if crossed else None
        self.ffn = None if plan.parallel else branch(ffn, "ffn")

    def forward(
        self,
        stream: Stream,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Stream:
        stream, _ = self.attention.step(stream, mask=mask, causal=causal, rotary=rotary, cache=cache)
        if self.cross is not None:
            stream, _ = self.cross.step(stream, memory, mask=memory_mask)
        if self.ffn is not None:
            stream, _ = self.ffn.step(stream)
        return stream


class TransformerStack(FusingModule):
    """Layers in a row over one stream, with the final norm that the placement asks for."""

    def __init__(self, config: TransformerConfig, plan: Schedule, *, causal: bool) -> None:
        super().__init__(config.fuse)
        self.causal = causal

        def make(features: int) -> nn.Module:
            return build(config.norm, features)

        self.layers = nn.ModuleList(TransformerLayer(config, plan, n, make) for n in range(1, plan.depth + 1))
        ends = plan.final_norm if config.final_norm is None else config.final_norm
        self.final_norm = make(config.dim) if ends else None

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
    ) -> Tensor:
        queries = x.shape[1]
        keys = queries + (0 if cache is None else cache.length)
        masks: dict[int | None, Tensor | None] = {}
        for layer in self.layers:
            assert isinstance(layer, TransformerLayer)
            if layer.window not in masks:
                masks[layer.window] = allowed(
                    queries, keys, causal=self.causal, window=layer.window, valid=valid, device=x.device
                )
        seen = None if memory_valid is None else memory_valid.to(torch.bool)[:, None, None, :]
        stream = Stream(x)
        for layer in self.layers:
            assert isinstance(layer, TransformerLayer)
            mask = masks[layer.window]
            stream = layer(
                stream,
                mask=mask,
                causal=self.causal and mask is None,
                rotary=rotary,
                cache=cache,
                memory=memory,
                memory_mask=seen,
            )
        return finish(stream, self.final_norm, fuse=self.fuses("final_norm"))


class Transformer(nn.Module):
    """A reference Transformer: decoder, encoder or both, with any norm at any placement.

    Small and readable rather than fast: attention is torch's own, each add and norm is one call where the wiring
    allows, and the output of a branch is added inside the next branch's norm.

    Args:
        config: see `TransformerConfig`; or give its fields as keywords.

    Shape:
        tokens ``(B, T)`` to logits ``(B, T, V)``.

    Raises:
        ValueError: fields that do not fit; at the call, tokens past the learned positions, or a source given to a
            model without encoder (or missing where there is one).

    Parameters have the names ``embed``, ``stack.layers.N.attention.sublayer.query`` and so on;
    `normkit.residual.from_transformers` reads other libraries' names.
    """

    def __init__(self, config: TransformerConfig | None = None, **fields: Any) -> None:
        super().__init__()
        if config is not None and fields:
            raise ValueError(f"give a config or its fields, not both; got {', '.join(sorted(fields))} beside a config")
        c = TransformerConfig(**fields) if config is None else config
        self.config = c
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.position = nn.Embedding(c.max_positions, c.dim) if c.positions == "learned" else None
        self.segment = nn.Embedding(c.token_types, c.dim) if c.token_types else None
        self.embedding_norm = build(c.norm, c.dim) if c.embedding_norm else None
        pair = c.kind == "encoder_decoder"
        self.encoder = TransformerStack(c, c.schedule(encoder=True), causal=False) if pair else None
        self.stack = TransformerStack(c, c.schedule(), causal=c.kind != "encoder")
        self.transform = nn.Linear(c.dim, c.dim) if c.head_transform else None
        self.transform_norm = build(c.norm, c.dim) if c.head_transform else None
        self.head = nn.Linear(c.dim, c.vocab, bias=c.head_bias)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        self.initialize()

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Every branch by its own placement (see `init_for`); embeddings and head normal with ``embedding_std``."""
        for module in self.modules():
            if isinstance(module, Residual):
                initialize_branch(module, base=self.config.base, generator=generator)
        for module in (self.embed, self.position, self.segment, self.head, self.transform):
            if module is not None:
                module.weight.normal_(0.0, self.config.embedding_std, generator=generator)
        for module in (self.head, self.transform):
            if module is not None and module.bias is not None:
                module.bias.zero_()

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        types: Tensor | None = None,
        cache: KeyValueCache | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits ``(B, T, V)``.

        Args:
            tokens: ``(B, T)``.
            mask: ``(B, S)`` with S the cached and the new positions, True (or 1) at valid ones.
            types: segment of each token, 0 by default.
            cache: extended in place by the new positions; a pair's encoder output is kept in it too.
            source: the encoder's tokens ``(B, S)``.
            source_mask: its valid positions.
        """
        return self.logits(
            self.hidden(tokens, mask=mask, types=types, cache=cache, source=source, source_mask=source_mask)
        )

    def hidden(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        types: Tensor | None = None,
        cache: KeyValueCache | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """The states ``(B, T, C)`` after the final norm; arguments as `forward`."""
        self._check(tokens, mask, types, cache, source, source_mask)
        memory = self._memory(source, source_mask, cache)
        start = 0 if cache is None else cache.length
        x, rotary = self._embed(tokens, types, start)
        x = self.stack(x, mask, rotary, cache, memory, source_mask)
        return x.to(self.embed.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head over `hidden`'s states."""
        if self.transform is not None and self.transform_norm is not None:
            hidden = self.transform_norm(activation(self.config.act)(self.transform(hidden)))
        scores = self.head(hidden)
        cap = self.config.logit_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def _check(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        types: Tensor | None,
        cache: KeyValueCache | None,
        source: Tensor | None,
        source_mask: Tensor | None,
    ) -> None:
        """Refuse arguments that do not fit before anything is computed or written to the cache."""
        kind = self.config.kind
        for name, value in (("tokens", tokens), ("source", source)):
            if value is None:
                continue
            if value.is_floating_point() or value.dtype == torch.bool:
                raise TypeError(f"{name} must be integers; got {value.dtype}")
            if value.dim() != 2:
                raise ValueError(f"{name} must be (B, T); got shape {tuple(value.shape)}")
        if types is not None and self.segment is None:
            raise ValueError("types needs token_types >= 1; this model has no segment embeddings")
        for name, value in (("source", source), ("source_mask", source_mask)):
            if value is not None and self.encoder is None:
                raise ValueError(f"{name} needs kind='encoder_decoder'; this model is kind={kind!r}")
        batch, length = tokens.shape
        if source is not None and source.shape[0] != batch:
            raise ValueError(f"source has {source.shape[0]} samples and tokens {batch}")
        if cache is not None:
            if kind == "encoder":
                raise ValueError(
                    "a cache needs a decoder: in an encoder earlier positions would have to see later ones"
                )
            if cache.length and cache.batch != batch:
                raise ValueError(f"the cache holds {cache.batch} samples and tokens {batch}")
            length = length + cache.length
        shapes: list[tuple[str, Tensor | None, tuple[int, ...]]] = [("mask", mask, (batch, length))]
        if source is not None:
            shapes.append(("source_mask", source_mask, tuple(source.shape)))
        for name, value, shape in shapes:
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(f"{name} must be {shape}, batch and positions; got shape {tuple(value.shape)}")

    def _memory(self, source: Tensor | None, valid: Tensor | None, cache: KeyValueCache | None) -> Tensor | None:
        if self.encoder is None:
            return None
        if cache is not None and cache.memory is not None:
            return cache.memory
        if source is None:
            raise ValueError("an encoder-decoder needs source, the encoder's tokens (B, S)")
        x, rotary = self._embed(source, None, 0)
        memory = self.encoder(x, valid, rotary).to(self.embed.weight.dtype)
        if cache is not None:
            cache.memory = memory
        return memory

    def _embed(self, tokens: Tensor, types: Tensor | None, start: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        c = self.config
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        if c.embedding_scale != 1:
            x = x * torch.tensor(c.embedding_scale, dtype=x.dtype, device=x.device)
        if self.segment is not None:
            x = x + self.segment(torch.zeros_like(tokens) if types is None else types)
        if self.position is not None:
            if start + tokens.shape[1] > c.max_positions:
                raise ValueError(f"{start + tokens.shape[1]} positions exceed max_positions={c.max_positions}")
            x = x + self.position(positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if c.positions != "rotary":
            return x, None
        return x, rotary_table(positions, c.head_dim or c.dim // c.heads, c.rope_theta)
