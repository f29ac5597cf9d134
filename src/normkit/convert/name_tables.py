"""Tables of names: where each family and framework keeps each norm, and what it calls a norm's tensors.

A slot is the name of a norm in `normkit.residual.Transformer`, which says where it sits on the residual stream; the
other side is a template with ``{i}`` for the layer and, where the tensor's own name is not a last part, ``{leaf}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from normkit.residual.transformer_weights import FAMILIES, Source
from normkit.spec import ANNOTATED_LAYER, GEMMA, LLAMA, OLMO2, T5, TORCH_LAYER, NormSpec


@dataclass(frozen=True, slots=True)
class Style:
    """What a framework calls a norm's tensors, and how it joins names."""

    weight: str = "weight"
    bias: str = "bias"
    running_mean: str = "running_mean"
    running_var: str = "running_var"
    separator: str = "."
    collections: tuple[str, str] = ("", "")
    """What stands before parameters and before running statistics."""

    def leaves(self) -> dict[str, str]:
        """Name to role."""
        return {getattr(self, role): role for role in ROLES}


ROLES = ("weight", "bias", "running_mean", "running_var")
STYLES = {
    "torch": Style(),
    "tf": Style("gamma", "beta", "moving_mean", "moving_variance"),  # also BERT's first port to torch
    "keras": Style("gamma", "beta", "moving_mean", "moving_variance", "/"),
    "flax": Style("scale", "bias", "mean", "var", "/", ("params/", "batch_stats/")),
    "textbook": Style("a_2", "b_2"),
}


@dataclass(frozen=True)
class Naming:
    """One way to name the norms of a model."""

    slots: Mapping[str, str]
    spec: NormSpec | None = None
    """What they compute; None where the naming is used for norms of several kinds."""
    weight_offset: float | None = None
    """Of the stored gains; None where the naming leaves it open."""
    prefix: str = ""
    """What a file of the bare model, without its head, leaves out."""
    others: Mapping[str, Source] | None = None
    """The names of everything else, where they are known."""
    qk: str | None = None
    """``"head"``: query and key norms over each head; ``"full"``: over all heads."""
    required: bool = True
    """Every slot must be there (a family), or may be (a naming of several)."""
    style: Style = field(default_factory=Style)


_PRE = {"attention.input_norm": "input_layernorm", "ffn.input_norm": "post_attention_layernorm"}
_QK = {"attention.sublayer.query_norm": "self_attn.q_norm", "attention.sublayer.key_norm": "self_attn.k_norm"}
_SANDWICH = {
    "attention.input_norm": "input_layernorm",
    "attention.output_norm": "post_attention_layernorm",
    "ffn.input_norm": "pre_feedforward_layernorm",
    "ffn.output_norm": "post_feedforward_layernorm",
}


def _decoder(norms: Mapping[str, str], layer: str = "model.layers.{i}.", **ends: str) -> dict[str, str]:
    """Slots of a decoder's layers and of its ends."""
    slots = {f"stack.layers.{{i}}.{mine}": f"{layer}{theirs}" for mine, theirs in norms.items()}
    return {**slots, **{{"final": "stack.final_norm"}.get(mine, mine): theirs for mine, theirs in ends.items()}}


def _known(family: str, *, norms: bool) -> dict[str, Source]:
    """What the reference Transformer reads of a family: its norms, or all else."""
    names = FAMILIES[family].names
    return {mine: s for mine, s in names.items() if mine.rpartition(".")[0].endswith("norm") == norms}


def _read(family: str) -> dict[str, str]:
    return {mine.rpartition(".")[0]: s.name.rpartition(".")[0] for mine, s in _known(family, norms=True).items()}


_LINEAR = _known("llama", norms=False)

NAMINGS: dict[str, Naming] = {
    "llama": Naming(_read("llama"), LLAMA, 0.0, "model.", _LINEAR),
    "gemma": Naming(_read("llama"), GEMMA, 1.0, "model.", _LINEAR),
    "gemma2": Naming(_read("gemma2"), GEMMA, 1.0, "model.", _LINEAR),
    "gemma3": Naming(_decoder({**_SANDWICH, **_QK}, final="model.norm"), GEMMA, 1.0, "model.", _LINEAR, "head"),
    "olmo2": Naming(_read("olmo2"), OLMO2, 0.0, "model.", _LINEAR, "full"),
    "qwen3": Naming(_decoder({**_PRE, **_QK}, final="model.norm"), LLAMA, 0.0, "model.", _LINEAR, "head"),
    "gpt2": Naming(_read("gpt2"), TORCH_LAYER, 0.0, "transformer.", _known("gpt2", norms=False)),
    "bert": Naming(_read("bert"), TORCH_LAYER, 0.0, "bert.", _known("bert", norms=False)),
    "t5": Naming(
        {
            "encoder.layers.{i}.attention.input_norm": "encoder.block.{i}.layer.0.layer_norm",
            "encoder.layers.{i}.ffn.input_norm": "encoder.block.{i}.layer.1.layer_norm",
            "encoder.final_norm": "encoder.final_layer_norm",
            "stack.layers.{i}.attention.input_norm": "decoder.block.{i}.layer.0.layer_norm",
            "stack.layers.{i}.cross.input_norm": "decoder.block.{i}.layer.1.layer_norm",
            "stack.layers.{i}.ffn.input_norm": "decoder.block.{i}.layer.2.layer_norm",
            "stack.final_norm": "decoder.final_layer_norm",
        },
        T5,
        0.0,
    ),
}
_MEGATRON = {
    "stack.layers.{i}.attention.input_norm": "decoder.layers.{i}.self_attention.linear_qkv.layer_norm_{leaf}",
    "stack.layers.{i}.attention.sublayer.query_norm": "decoder.layers.{i}.self_attention.q_layernorm",
    "stack.layers.{i}.attention.sublayer.key_norm": "decoder.layers.{i}.self_attention.k_layernorm",
    "stack.layers.{i}.ffn.input_norm": "decoder.layers.{i}.mlp.linear_fc1.layer_norm_{leaf}",
    "stack.final_norm": "decoder.final_layernorm",
}
_MEGATRON_LOCAL = _MEGATRON | {
    "stack.layers.{i}.attention.input_norm": "decoder.layers.{i}.input_layernorm",
    "stack.layers.{i}.ffn.input_norm": "decoder.layers.{i}.pre_mlp_layernorm",
}
_GGUF = {
    "embedding_norm": "token_embd_norm",
    "stack.layers.{i}.attention.input_norm": "blk.{i}.attn_norm",
    "stack.layers.{i}.attention.sublayer.query_norm": "blk.{i}.attn_q_norm",
    "stack.layers.{i}.attention.sublayer.key_norm": "blk.{i}.attn_k_norm",
    "stack.layers.{i}.attention.output_norm": "blk.{i}.post_attention_norm",
    "stack.layers.{i}.attention.stream_norm": "blk.{i}.attn_output_norm",
    "stack.layers.{i}.ffn.input_norm": "blk.{i}.ffn_norm",
    "stack.layers.{i}.ffn.output_norm": "blk.{i}.post_ffw_norm",
    "stack.layers.{i}.ffn.stream_norm": "blk.{i}.layer_output_norm",
    "stack.final_norm": "output_norm",
}
_GGUF_PAIR = {
    "encoder.layers.{i}.attention.input_norm": "enc.blk.{i}.attn_norm",
    "encoder.layers.{i}.ffn.input_norm": "enc.blk.{i}.ffn_norm",
    "encoder.final_norm": "enc.output_norm",
    "stack.layers.{i}.attention.input_norm": "dec.blk.{i}.attn_norm",
    "stack.layers.{i}.cross.input_norm": "dec.blk.{i}.cross_attn_norm",
    "stack.layers.{i}.ffn.input_norm": "dec.blk.{i}.ffn_norm",
    "stack.final_norm": "dec.output_norm",
}
_GEMMA_FLAX = {
    "stack.layers.{i}.attention.input_norm": "transformer.layer_{i}.pre_attention_norm",
    "stack.layers.{i}.attention.sublayer.query_norm": "transformer.layer_{i}.attn._query_norm",
    "stack.layers.{i}.attention.sublayer.key_norm": "transformer.layer_{i}.attn._key_norm",
    "stack.layers.{i}.attention.output_norm": "transformer.layer_{i}.post_attention_norm",
    "stack.layers.{i}.ffn.input_norm": "transformer.layer_{i}.pre_ffw_norm",
    "stack.layers.{i}.ffn.output_norm": "transformer.layer_{i}.post_ffw_norm",
    "stack.final_norm": "transformer.final_norm",
}
_ALL = {slot: slot for naming in NAMINGS.values() for slot in naming.slots}
NAMINGS |= {
    "normkit": Naming(_ALL, required=False),
    "gguf": Naming(_GGUF, None, 0.0, required=False),
    "gguf_pair": Naming(_GGUF_PAIR, None, 0.0, required=False),
    "megatron": Naming(_MEGATRON, required=False),
    "megatron_local": Naming(_MEGATRON_LOCAL, required=False),
    "nemo": Naming({slot: f"model.{name}" for slot, name in _MEGATRON.items()}, required=False),
    "gemma_flax": Naming(
        _GEMMA_FLAX, GEMMA, 1.0, required=False, style=Style("scale", separator="/", collections=("", ""))
    ),
}
"""Transformers' families, normkit's own and other frameworks'. ``NAME/STYLE`` changes the tensors' own names."""

TEXTBOOK = ANNOTATED_LAYER
"""What ``a_2`` and ``b_2`` belong to: the unbiased deviation, with eps outside the root."""
