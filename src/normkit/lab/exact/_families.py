"""Published architectures as small models with random weights, audited."""

from __future__ import annotations

from typing import Any

import torch

from normkit.audit import Audit, audit
from normkit.residual import Transformer
from normkit.spec import COHERE, TORCH_LAYER

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_TOKENS}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}

LAYERS = 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("bert", {**_SIZES, **_TOKENS}),
    "GPT-2": ("gpt2", _GPT2),
    "Llama": ("llama", {**_SIZES, **_TOKENS}),
    "Mistral": ("mistral", {**_SIZES, **_TOKENS, "num_key_value_heads": 2}),
    "Qwen2": ("qwen2", {**_SIZES, **_TOKENS, "num_key_value_heads": 2}),
    "Gemma 2": ("gemma2", {**_SIZES, **_TOKENS, "num_key_value_heads": 2, "head_dim": 8}),
    "OLMo 2": ("olmo2", {**_SIZES, **_TOKENS}),
    "T5": ("t5", {**_T5, "vocab_size": 99, "decoder_start_token_id": 0}),
}
"""transformers' model type and its size; all that concerns norms is the library's default."""


def audit_family(name: str) -> Audit:
    """Audit one of `FAMILIES`, or of the models that papers describe and nobody can download.

    Raises:
        ImportError: transformers is not installed.
    """
    tokens = torch.zeros(2, 16, dtype=torch.long)
    if name in FAMILIES:
        return _of_library(name, tokens)
    return audit(_of_paper(name).eval(), tokens)


def _of_library(name: str, tokens: torch.Tensor) -> Audit:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this claim builds models: pip install 'normkit[transformers]'") from error
    kind, sizes = FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModel.from_config(config).eval()
    if config.is_encoder_decoder:
        return audit(model, input_ids=tokens, decoder_input_ids=tokens)
    return audit(model, input_ids=tokens, attention_mask=torch.ones_like(tokens), return_dict=True)


def _of_paper(name: str) -> torch.nn.Module:
    """GPT-3 (arXiv:2005.14165: GPT-2's architecture) and PaLM (arXiv:2204.02311: parallel, LayerNorm without bias)."""
    if name == "GPT-3":
        return Transformer(
            vocab=99, dim=32, depth=LAYERS, heads=4, norm=TORCH_LAYER, placement="pre", gated=False, act="gelu",
            attention_bias=True, ffn_bias=True, positions="learned",
        )  # fmt: skip
    if name == "PaLM":
        return Transformer(vocab=99, dim=32, depth=LAYERS, heads=4, kv_heads=1, norm=COHERE, placement="parallel")
    raise ValueError(f"unknown family {name!r}; known are {', '.join([*FAMILIES, 'GPT-3', 'PaLM'])}")
