"""Names: how other libraries' Transformer configs and weights map to `Transformer`'s."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.residual.attention import Activation
from normkit.residual.transformer import Transformer, TransformerConfig
from normkit.spec import GEMMA, LLAMA, OLMO2, TORCH_LAYER

_ACTS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where one of our parameters comes from.

    Args:
        name: the other library's name; ``{i}`` is the layer's number from 0.
        transposed: stored (in, out) there.
        part: (number, of how many) equal parts of the outputs, where several of ours are stored as one.
    """

    name: str
    transposed: bool = False
    part: tuple[int, int] | None = None

    def read(self, weights: Mapping[str, Tensor], layer: int) -> tuple[str, Tensor]:
        """The full name and the tensor in our layout."""
        name = self.name.replace("{i}", str(layer))
        if name not in weights:
            raise ValueError(f"the weights have no {name!r}; is this the right family?")
        value = weights[name]
        value = value.T if self.transposed and value.dim() == 2 else value
        return name, value if self.part is None else value.chunk(self.part[1])[self.part[0]]


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: its config, its names and the names that carry nothing to load."""

    config: Callable[[dict[str, Any]], TransformerConfig]
    names: dict[str, Source]
    ignored: str = r"$^"


def _gated(norms: dict[str, str]) -> dict[str, Source]:
    """The names that Llama and its relatives share, with their norms."""
    layer = "model.layers.{i}."
    ours = "layers.{i}."
    names = {
        "embed.weight": "model.embed_tokens.weight",
        "stack.final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    for kind in ("weight", "bias"):
        for mine, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            names[f"stack.{ours}attention.sublayer.{mine}.{kind}"] = f"{layer}self_attn.{theirs}_proj.{kind}"
        for mine in ("gate", "up", "down"):
            names[f"stack.{ours}ffn.sublayer.{mine}.{kind}"] = f"{layer}mlp.{mine}_proj.{kind}"
    for mine, theirs in norms.items():
        names[f"stack.{ours}{mine}.weight"] = f"{layer}{theirs}.weight"
    return {mine: Source(theirs) for mine, theirs in names.items()}


def _llama(c: dict[str, Any]) -> TransformerConfig:
    return _decoder(c, norm=LLAMA.replace(eps=c["rms_norm_eps"]), placement="pre", ffn_bias=c.get("mlp_bias", False))


def _gemma2(c: dict[str, Any]) -> TransformerConfig:
    if c.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported")
    kinds = c["layer_types"]
    return _decoder(
        c,
        norm=GEMMA.replace(eps=c["rms_norm_eps"]),
        placement="sandwich",
        attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=c["attn_logit_softcapping"],
        logit_softcap=c["final_logit_softcapping"],
        windows=tuple(c["sliding_window"] if kind == "sliding_attention" else None for kind in kinds),
        embedding_scale=c["hidden_size"] ** 0.5,
        act=_act(c["hidden_activation"]),
    )


def _olmo2(c: dict[str, Any]) -> TransformerConfig:
    return _decoder(c, norm=OLMO2.replace(eps=c["rms_norm_eps"]), placement="output", qk_norm="full")


def _decoder(c: dict[str, Any], **fields: Any) -> TransformerConfig:
    """What Llama and its relatives share."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary positions of type {kind!r} are not supported; only 'default' is")
    shared: dict[str, Any] = {
        "vocab": c["vocab_size"],
        "dim": c["hidden_size"],
        "depth": c["num_hidden_layers"],
        "heads": c["num_attention_heads"],
        "kv_heads": c["num_key_value_heads"],
        "head_dim": c.get("head_dim"),
        "ffn_dim": c["intermediate_size"],
        "attention_bias": bool(c.get("attention_bias", False)),
        "rope_theta": rope.get("rope_theta", c.get("rope_theta", 10000.0)),
        "max_positions": c["max_position_embeddings"],
        "tie_embeddings": c["tie_word_embeddings"],
    }
    if "act" not in fields:
        shared["act"] = _act(c["hidden_act"])
    return TransformerConfig(**shared, **fields)


def _gpt2(c: dict[str, Any]) -> TransformerConfig:
    for flag in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if c.get(flag):
            raise ValueError(f"{flag} is not supported")
    return TransformerConfig(
        vocab=c["vocab_size"],
        dim=c["n_embd"],
        depth=c["n_layer"],
        heads=c["n_head"],
        ffn_dim=c["n_inner"] or 4 * c["n_embd"],
        norm=TORCH_LAYER.replace(eps=c["layer_norm_epsilon"]),
        placement="pre",
        gated=False,
        act=_act(c["activation_function"]),
        attention_bias=True,
        ffn_bias=True,
        positions="learned",
        max_positions=c["n_positions"],
        attention_scale=None if c.get("scale_attn_weights", True) else 1.0,
        tie_embeddings=c.get("tie_word_embeddings", True),
    )


def _bert(c: dict[str, Any]) -> TransformerConfig:
    if c.get("is_decoder"):
        raise ValueError("is_decoder is not supported; only BERT as an encoder is")
    return TransformerConfig(
        vocab=c["vocab_size"],
        dim=c["hidden_size"],
        depth=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        ffn_dim=c["intermediate_size"],
        kind="encoder",
        norm=TORCH_LAYER.replace(eps=c["layer_norm_eps"]),
        placement="post",
        embedding_norm=True,
        gated=False,
        act=_act(c["hidden_act"]),
        attention_bias=True,
        ffn_bias=True,
        head_bias=True,
        positions="learned",
        max_positions=c["max_position_embeddings"],
        token_types=c["type_vocab_size"],
        head_transform=True,
        tie_embeddings=c.get("tie_word_embeddings", True),
    )


def _act(name: str) -> Activation:
    if name not in _ACTS:
        raise ValueError(f"activation {name!r} is not supported; known are {', '.join(_ACTS)}")
    return _ACTS[name]


def _both(ours: str, theirs: str, **how: Any) -> dict[str, Source]:
    """A weight and its bias."""
    return {f"{ours}.{kind}": Source(f"{theirs}.{kind}", **how) for kind in ("weight", "bias")}


_GPT2_LAYER = "transformer.h.{i}."
_GPT2 = {
    "embed.weight": Source("transformer.wte.weight"),
    "position.weight": Source("transformer.wpe.weight"),
    "head.weight": Source("lm_head.weight"),
    **_both("stack.final_norm", "transformer.ln_f"),
    **_both("stack.layers.{i}.attention.input_norm", f"{_GPT2_LAYER}ln_1"),
    **_both("stack.layers.{i}.ffn.input_norm", f"{_GPT2_LAYER}ln_2"),
    **_both("stack.layers.{i}.attention.sublayer.query", f"{_GPT2_LAYER}attn.c_attn", transposed=True, part=(0, 3)),
    **_both("stack.layers.{i}.attention.sublayer.key", f"{_GPT2_LAYER}attn.c_attn", transposed=True, part=(1, 3)),
    **_both("stack.layers.{i}.attention.sublayer.value", f"{_GPT2_LAYER}attn.c_attn", transposed=True, part=(2, 3)),
    **_both("stack.layers.{i}.attention.sublayer.output", f"{_GPT2_LAYER}attn.c_proj", transposed=True),
    **_both("stack.layers.{i}.ffn.sublayer.up", f"{_GPT2_LAYER}mlp.c_fc", transposed=True),
    **_both("stack.layers.{i}.ffn.sublayer.down", f"{_GPT2_LAYER}mlp.c_proj", transposed=True),
}
_BERT_LAYER = "bert.encoder.layer.{i}."
_BERT = {
    "embed.weight": Source("bert.embeddings.word_embeddings.weight"),
    "position.weight": Source("bert.embeddings.position_embeddings.weight"),
    "segment.weight": Source("bert.embeddings.token_type_embeddings.weight"),
    "head.weight": Source("cls.predictions.decoder.weight"),
    "head.bias": Source("cls.predictions.bias"),
    **_both("embedding_norm", "bert.embeddings.LayerNorm"),
    **_both("transform", "cls.predictions.transform.dense"),
    **_both("transform_norm", "cls.predictions.transform.LayerNorm"),
    **_both("stack.layers.{i}.attention.sublayer.query", f"{_BERT_LAYER}attention.self.query"),
    **_both("stack.layers.{i}.attention.sublayer.key", f"{_BERT_LAYER}attention.self.key"),
    **_both("stack.layers.{i}.attention.sublayer.value", f"{_BERT_LAYER}attention.self.value"),
    **_both("stack.layers.{i}.attention.sublayer.output", f"{_BERT_LAYER}attention.output.dense"),
    **_both("stack.layers.{i}.attention.stream_norm", f"{_BERT_LAYER}attention.output.LayerNorm"),
    **_both("stack.layers.{i}.ffn.sublayer.up", f"{_BERT_LAYER}intermediate.dense"),
    **_both("stack.layers.{i}.ffn.sublayer.down", f"{_BERT_LAYER}output.dense"),
    **_both("stack.layers.{i}.ffn.stream_norm", f"{_BERT_LAYER}output.LayerNorm"),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        _llama,
        _gated({"attention.input_norm": "input_layernorm", "ffn.input_norm": "post_attention_layernorm"}),
    ),
    "gemma2": Family(
        _gemma2,
        _gated(
            {
                "attention.input_norm": "input_layernorm",
                "attention.output_norm": "post_attention_layernorm",
                "ffn.input_norm": "pre_feedforward_layernorm",
                "ffn.output_norm": "post_feedforward_layernorm",
            }
        ),
    ),
    "olmo2": Family(
        _olmo2,
        _gated(
            {
                "attention.output_norm": "post_attention_layernorm",
                "ffn.output_norm": "post_feedforward_layernorm",
                "attention.sublayer.query_norm": "self_attn.q_norm",
                "attention.sublayer.key_norm": "self_attn.k_norm",
            }
        ),
    ),
    "gpt2": Family(_gpt2, _GPT2, r".*\.attn\.(masked_)?bias"),
    "bert": Family(
        _bert, _BERT, r"cls\.predictions\.decoder\.bias|cls\.seq_relationship\..*|.*position_ids|.*\.pooler\..*"
    ),
}
"""Families by transformers' ``model_type``."""


def from_transformers(model: nn.Module) -> Transformer:
    """The reference Transformer with the weights of one of transformers' models (Llama, Gemma 2, OLMo 2, GPT-2, BERT).

    Args:
        model: the model with its head: a causal or masked language model, with ``config`` and ``state_dict``.

    Raises:
        ValueError: as `from_weights`.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no config; use from_weights with a config dict")
    return from_weights(config.to_dict(), model.state_dict())


def from_weights(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Transformer:
    """The reference Transformer with weights under another library's names.

    Args:
        config: that library's config, with ``model_type`` one of `FAMILIES`.
        weights: its state_dict. The parameters are copies, in their dtype.

    Raises:
        ValueError: an unknown family, a config that asks for more than the reference has, a weight that is missing,
            left over or of another shape.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(map(repr, FAMILIES))}; got {kind!r}")
    family = FAMILIES[kind]
    ours = family.config(dict(config))
    with torch.device("meta"):
        made = Transformer(ours)
    used: set[str] = set()
    state: dict[str, Tensor] = {}
    for name, parameter in made.state_dict().items():
        if ours.tie_embeddings and name == "head.weight":
            continue
        layer = re.search(r"layers\.(\d+)\.", name)
        pattern = re.sub(r"layers\.\d+\.", "layers.{i}.", name)
        if pattern not in family.names:
            raise ValueError(f"family {kind!r} has no name for {name!r}")
        theirs, value = family.names[pattern].read(weights, int(layer[1]) if layer else 0)
        if value.shape != parameter.shape:
            raise ValueError(f"{theirs!r} gives shape {tuple(value.shape)}; {name!r} needs {tuple(parameter.shape)}")
        used.add(theirs)
        state[name] = value.detach().clone()
    if ours.tie_embeddings:
        state["head.weight"] = state["embed.weight"]
        used.add(family.names["head.weight"].name)
    left = sorted(k for k in weights if k not in used and not re.fullmatch(family.ignored, k))
    if left:
        raise ValueError(f"weights that the reference has no place for: {', '.join(left[:5])} ({len(left)} in all)")
    made.load_state_dict(state, assign=True)
    if ours.tie_embeddings:
        made.head.weight = made.embed.weight
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    return made
