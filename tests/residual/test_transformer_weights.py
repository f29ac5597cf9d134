"""Weights of transformers' models, read by name: the same logits, cached or not."""

from __future__ import annotations

import pytest
import torch

from normkit.residual import KeyValueCache, from_transformers, from_weights

transformers = pytest.importorskip("transformers")

BASE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
GROUPED = BASE | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA2 = GROUPED | {
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 99,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
CASES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama_tied_with_biases": (
        "LlamaForCausalLM",
        "LlamaConfig",
        GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama_multi_query": ("LlamaForCausalLM", "LlamaConfig", GROUPED | {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA2),
    "gemma2_without_caps": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", BASE),
}


def theirs(name, layers=4):
    """The family's own model with every gain, bias and matrix moved off its start."""
    model, config, fields = CASES[name]
    fields = fields | {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**fields)).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.1))
    return made


def batch(name, length=17):
    torch.manual_seed(1)
    ids = torch.randint(3, 99, (2, length))
    types = torch.randint(0, 2, ids.shape) if name == "bert" else None
    valid = torch.ones_like(ids)
    valid[1, slice(-4, None) if name == "bert" else slice(0, 4)] = 0
    return ids, types, valid


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    model = theirs(name)
    ours = from_transformers(model).eval()
    ids, types, valid = batch(name)
    extra = {} if types is None else {"token_type_ids": types}
    want = model(input_ids=ids, **extra).logits
    assert want.abs().max() > 1
    assert (ours(ids, types=types) - want).abs().max() < 1e-5
    want = model(input_ids=ids, attention_mask=valid, **extra).logits
    got = ours(ids, mask=valid, types=types)
    assert (got - want)[valid.bool()].abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", [n for n in CASES if n != "bert"])
def test_cached_decoding(name):
    model = theirs(name)
    ours = from_transformers(model).eval()
    ids, _, _ = batch(name)
    cache = KeyValueCache()
    parts = [ours(ids[:, :6], cache=cache)] + [ours(ids[:, n : n + 1], cache=cache) for n in range(6, 17)]
    assert (torch.cat(parts, 1) - model(input_ids=ids).logits).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_read(name):
    """Zeroing any one tensor of the source changes the copy's logits."""
    model = theirs(name, layers=2)
    ids, types, _ = batch(name, 9)
    config, weights = model.config.to_dict(), model.state_dict()
    want = from_weights(config, weights).eval()(ids, types=types)
    own = {k for k, _ in model.named_parameters()}
    for key in own:
        if key.endswith("attention.self.key.bias"):
            continue  # the same for every key: softmax does not see it
        changed = weights | {key: torch.zeros_like(weights[key])}
        if key == "cls.predictions.decoder.bias":
            continue  # the same tensor as cls.predictions.bias
        assert not torch.equal(from_weights(config, changed).eval()(ids, types=types), want), key


def test_gradients_reach_every_parameter():
    ours = from_transformers(theirs("gemma2"))
    ours(batch("gemma2")[0]).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in ours.parameters())


def test_refusals():
    model = theirs("llama")
    config, weights = model.config.to_dict(), model.state_dict()
    with pytest.raises(ValueError, match=r"model_type must be one of 'llama'.*got 'mamba'"):
        from_weights(config | {"model_type": "mamba"}, weights)
    with pytest.raises(ValueError, match=r"no 'model\.layers\.3\.mlp\.up_proj\.weight'"):
        from_weights(config, {k: v for k, v in weights.items() if k != "model.layers.3.mlp.up_proj.weight"})
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.9\.extra"):
        from_weights(config, weights | {"model.layers.9.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"gives shape \(64, 32\); .* needs \(48, 32\)"):
        from_weights(config | {"intermediate_size": 48}, weights)
    with pytest.raises(ValueError, match="rotary positions of type 'linear'"):
        from_weights(config | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, weights)
    with pytest.raises(ValueError, match="activation 'tanh' is not supported"):
        from_weights(config | {"hidden_act": "tanh"}, weights)
    with pytest.raises(ValueError, match="has no config"):
        from_transformers(torch.nn.Linear(2, 2))
