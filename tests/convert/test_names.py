"""Names of norms: round trips, what real models call them, where they sit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import normkit
from normkit.convert import ConversionError
from normkit.convert.name_tables import NAMINGS, STYLES
from normkit.convert.names import from_keras, map_names, naming, running_momentum
from normkit.residual import from_weights
from tests.residual.test_transformer_weights import CASES, theirs
from tests.zoo import ZOO

FAMILIES = [name for name, n in NAMINGS.items() if n.required]
OTHERS = [name for name in NAMINGS if name not in FAMILIES]
STYLED = [
    f"{name}/{style}" for name in ("llama", "gpt2", "bert", "t5", "gemma2") for style in STYLES if style != "textbook"
]


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tensors.items()}


def norms(text: str, family: str, depth: int, width: int, seed: int = 0, *, bare: bool = False) -> dict[str, Tensor]:
    """A family's norms under a naming; values that moving by one keeps exact."""
    generator = torch.Generator().manual_seed(seed)
    spec, found = NAMINGS[family].spec, naming(text)
    assert spec is not None
    made = {}
    for slot in NAMINGS[family].slots:
        for layer in range(depth) if "{i}" in slot else (None,):
            size = width if NAMINGS[family].qk == "full" or "sublayer" not in slot else 8
            for role in ("weight", "bias") if spec.has_bias else ("weight",):
                template = found.slots[slot] if "{leaf}" in found.slots[slot] else found.slots[slot] + ".{leaf}"
                key = template.replace("{i}", str(layer)).replace("{leaf}", getattr(found.style, role))
                key = key.removeprefix(found.prefix) if bare else key
                made[key.replace(".", found.style.separator)] = (
                    torch.randint(-512, 512, (size,), generator=generator) / 256
                )
    return made


def home(family: str) -> list[str]:
    """Namings that can hold a family's norms."""
    held = [n for n in OTHERS if set(NAMINGS[family].slots) <= set(NAMINGS[n].slots)]
    held = [n for n in held if NAMINGS[n].spec in (None, NAMINGS[family].spec)]
    return [family, *held, *(s for s in STYLED if s.split("/")[0] == family)]


def offsets(source: str, target: str, family: str) -> dict[str, float]:
    """What must be said where a naming leaves the gain open."""
    own = NAMINGS[family].weight_offset
    assert own is not None
    return {
        f"{side}_offset": own
        for side, text in (("source", source), ("target", target))
        if naming(text).weight_offset is None
    }


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from(FAMILIES), st.integers(1, 11), st.integers(1, 9), st.integers(0, 99))
def test_every_map_goes_there_and_back(data: st.DataObject, family: str, depth: int, width: int, seed: int) -> None:
    width *= 8
    source, target = data.draw(st.sampled_from(home(family))), data.draw(st.sampled_from(home(family)))
    tensors = norms(source, family, depth, width, seed)
    there = map_names(shapes(tensors), source, target, **offsets(source, target, family))
    made = there.apply(tensors)
    assert len(made) == len(tensors) and there.left == ()
    assert sorted(made) == sorted(norms(target, family, depth, width))
    back = map_names(shapes(made), target, source, **offsets(target, source, family)).apply(made)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_every_naming_is_drawn() -> None:
    assert {text for family in FAMILIES for text in home(family)} >= {*NAMINGS, *STYLED}


@pytest.mark.parametrize("source", FAMILIES)
@pytest.mark.parametrize("target", FAMILIES)
def test_families_that_may_be_mapped(source: str, target: str) -> None:
    """Norms of the same kind at the same places: Llama and Gemma, whose gains differ by one. All else is refused."""
    tensors = norms(source, source, 3, 24)
    if source == target or {source, target} == {"llama", "gemma"}:
        got = map_names(shapes(tensors), source, target).apply(tensors)
        by = (NAMINGS[source].weight_offset or 0) - (NAMINGS[target].weight_offset or 0)
        assert all(torch.equal(got[name], t + by) for name, t in tensors.items())
        return
    with pytest.raises(ConversionError, match=r"no name map$") as caught:
        map_names(shapes(tensors), source, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("llama", "gpt2", "llama has norms of kind rms, gpt2 of kind layer"),
        ("llama", "olmo2", "no norm where llama has .*input_layernorm.* (pre-norm of the attention)"),
        ("llama", "qwen3", "also has .*q_norm.weight' (on the queries), which the source lacks"),
        ("qwen3", "llama", "llama has no norm where qwen3 has .*q_norm.weight' (on the queries)"),
        ("gpt2", "bert", "no norm where gpt2 has 'transformer.h.0.ln_1.weight' (pre-norm of the attention)"),
        ("gemma2", "gemma", "on the output of the attention"),
        ("t5", "llama", "no norm where t5 has 'encoder.block.0"),
        ("gpt2/textbook", "gpt2", "compute something else .*statistic 'unbiased' against 'mean_square', eps_at 'std'"),
    ],
)
def test_reasons(source: str, target: str, reason: str) -> None:
    tensors = norms(source, source.split("/")[0], 2, 16)
    with pytest.raises(ConversionError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        map_names(shapes(tensors), source, target)


def test_textbook_maps_to_a_builder_of_it() -> None:
    tensors = norms("gpt2/textbook", "gpt2", 2, 16)
    made = map_names(shapes(tensors), "gpt2/textbook", "normkit", target_offset=0.0).apply(tensors)
    assert torch.equal(made["stack.final_norm.bias"], tensors["transformer.ln_f.b_2"])
    assert map_names(shapes(made), "normkit", "gpt2/textbook", source_offset=0.0).apply(made).keys() == tensors.keys()


REAL: dict[str, tuple[str, dict[str, Any]]] = {
    name: (ZOO[name]["auto_class"], ZOO[name]["config"])
    for name in ("llama", "gemma", "gemma2", "olmo2", "qwen3", "gpt2", "bert", "t5")
}
REAL["gemma3_text"] = ("AutoModelForCausalLM", REAL["gemma2"][1])
PLACES = {
    "input_norm": "pre",
    "output_norm": "output",
    "stream_norm": "post",
    "query_norm": "qk",
    "key_norm": "qk",
    "final_norm": "final",
    "embedding_norm": "embedding",
    "transform_norm": "head",
}


@pytest.mark.parametrize("kind", REAL)
def test_tables_name_the_norms_of_the_real_models_where_they_sit(kind: str) -> None:
    """Every norm that an audit finds, and no other tensor; its slot says the same place as its dataflow."""
    transformers = pytest.importorskip("transformers")
    auto, fields = REAL[kind]
    family = kind.removesuffix("_text")
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config).eval()
    ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    extra = {"decoder_input_ids": ids} if family == "t5" else {}
    audited = normkit.audit(model, input_ids=ids, **extra)
    found = {f"{n.name}.weight": n for n in audited.norms if n.module is not None and n.spec and n.spec.has_weight}
    table = NAMINGS[family]
    own = {
        f"{name}.{role}": tuple(t.shape)
        for name, norm in ((n.name, n) for n in found.values())
        for role, t in norm.module.state_dict().items()  # type: ignore[union-attr]
    }
    mapped = map_names(own, family, "normkit")
    assert len(mapped.tensors) == len(own)
    for renamed in mapped.tensors:
        if not renamed.key.endswith(".weight"):
            continue
        norm = found[renamed.pieces[0].key]
        allowed = {PLACES[renamed.key.split(".")[-2]]}
        allowed |= {"final"} if allowed == {"post"} else set()  # the last one of a stack
        assert norm.placement in allowed, (renamed, norm.placement)
        assert norm.spec is not None and table.spec is not None
        assert norm.spec.kind == table.spec.kind and norm.spec.weight_offset == table.weight_offset
        assert norm.spec.has_bias == table.spec.has_bias and norm.spec.rounding == table.spec.rounding


@pytest.mark.parametrize("name", CASES)
def test_whole_checkpoints(name: str) -> None:
    """All tensors to normkit's names, as its own loader reads them, and back bit for bit."""
    pytest.importorskip("transformers")
    model = theirs(name, layers=3)
    family = model.config.model_type
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("cls.predictions.decoder")}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    there = map_names(shapes(weights), family, "normkit")
    made = there.apply(weights)
    ours = from_weights(model.config.to_dict(), model.state_dict()).state_dict()
    assert made.keys() == {n for n in ours if n in made} and len(ours) - len(made) <= 1  # a tied head
    for key, tensor in made.items():
        assert torch.equal(tensor, ours[key]), key
    back = map_names(shapes(made), "normkit", family).apply(made)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[k], v) for k, v in weights.items())


def test_a_file_without_its_head_lacks_the_prefix() -> None:
    tensors = norms("bert", "bert", 2, 16, bare=True)
    tensors = {k: v for k, v in tensors.items() if not k.startswith("cls.")}
    assert "embeddings.LayerNorm.weight" in tensors
    made = map_names(shapes(tensors), "bert", "normkit").apply(tensors)
    assert torch.equal(made["embedding_norm.weight"], tensors["embeddings.LayerNorm.weight"])
    gguf = map_names(shapes(tensors), "bert", "gguf").apply(tensors)
    assert torch.equal(gguf["blk.1.layer_output_norm.bias"], tensors["encoder.layer.1.output.LayerNorm.bias"])


def test_old_names_of_bert() -> None:
    tensors = norms("bert/tf", "bert", 2, 16)
    assert "bert.encoder.layer.1.output.LayerNorm.gamma" in tensors
    made = map_names(shapes(tensors), "bert/tf", "bert").apply(tensors)
    assert torch.equal(
        made["bert.encoder.layer.1.output.LayerNorm.bias"], tensors["bert.encoder.layer.1.output.LayerNorm.beta"]
    )


def test_gguf_bakes_the_one() -> None:
    tensors = norms("gemma2", "gemma2", 2, 16)
    made = map_names(shapes(tensors), "gemma2", "gguf").apply(tensors)
    theirs_ = tensors["model.layers.1.pre_feedforward_layernorm.weight"]
    assert torch.equal(made["blk.1.ffn_norm.weight"], theirs_ + 1)


def test_megatron_must_say_how_it_stores_gains() -> None:
    tensors = norms("megatron", "llama", 2, 16)
    with pytest.raises(ConversionError, match=r"may store gains as w or 1\+w .*say which"):
        map_names(shapes(tensors), "megatron", "llama")
    made = map_names(shapes(tensors), "megatron", "llama", source_offset=1.0).apply(tensors)
    key = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert torch.equal(made["model.layers.1.post_attention_layernorm.weight"], tensors[key] + 1)
    with pytest.raises(ConversionError, match="llama stores gains with offset 0, not 1"):
        map_names(shapes(tensors), "megatron", "llama", source_offset=1.0, target_offset=1.0)


def cut(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, tuple[int, ...]]:
    made = shapes({**tensors, **{k: v for k, v in changes.items() if v is not None}})
    return {k: v for k, v in made.items() if k not in [c for c, v in changes.items() if v is None]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.input_layernorm.weight": None}, "'model.layers.1.input_layernorm.weight' is missing"),
        ({"model.norm.weight": None}, "'model.norm.weight' is missing"),
        ({"model.norm.weight": torch.ones(9)}, "has 16 features, 'model.norm.weight' has 9"),
        ({"model.norm.weight": torch.ones(4, 4)}, "a norm's weight is a vector"),
        ({"model.norm.bias": torch.ones(16)}, "is a bias, and llama's norms have none"),
        ({"model.layers.4.input_layernorm.weight": torch.ones(16)}, "layer 3 of 5 has no norm"),
        ({"model.layers.0.mystery": torch.ones(16)}, "'model.layers.0.mystery' is no norm of llama and has no name"),
        ({"norm.weight": torch.ones(16)}, "names of one and the same tensor"),
    ],
)
def test_files_that_do_not_fit(changes: dict[str, Tensor | None], message: str) -> None:
    tensors = norms("llama", "llama", 3, 16)
    with pytest.raises(ConversionError, match=message):
        map_names(cut(tensors, **changes), "llama", "gguf")


def test_others_are_kept_only_on_demand() -> None:
    tensors = norms("t5", "t5", 2, 16) | {"shared.weight": torch.ones(9, 16)}
    with pytest.raises(ConversionError, match=r"'shared\.weight' is no norm of t5"):
        map_names(shapes(tensors), "t5", "gguf_pair")
    made = map_names(shapes(tensors), "t5", "gguf_pair", keep_others=True)
    assert "shared.weight" in made.apply(tensors) and any("keep their names" in n for n in made.notes)


def test_fused_projections_need_all_their_parts() -> None:
    tensors = norms("normkit", "gpt2", 1, 6) | {
        f"stack.layers.0.attention.sublayer.{part}.weight": torch.ones(6, 6) for part in ("query", "key")
    }
    with pytest.raises(ConversionError, match=r"stores 'transformer\.h\.0\.attn\.c_attn\.weight' of 3 tensors"):
        map_names(shapes(tensors), "normkit", "gpt2")


def test_query_norms_of_each_head_and_of_all() -> None:
    head = norms("gguf", "qwen3", 2, 24)
    assert map_names(shapes(head), "gguf", "qwen3")
    whole = norms("gguf", "olmo2", 2, 24)
    assert map_names(shapes(whole), "gguf", "olmo2")
    narrow = {k: (8,) if "attn_q_norm" in k else s for k, s in shapes(whole).items()}
    with pytest.raises(ConversionError, match="normalizes all heads together"):
        map_names(narrow, "gguf", "olmo2")
    uneven = {k: (16,) if "attn_q_norm" in k else s for k, s in shapes(head).items()}
    with pytest.raises(ConversionError, match="normalizes each head, all alike"):
        map_names(uneven, "gguf", "qwen3")


@pytest.mark.parametrize("style", ["keras", "flax", "tf"])
def test_running_statistics_of_any_model(style: str) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(6), torch.nn.Sequential(torch.nn.LayerNorm(6)))
    model.append(torch.nn.BatchNorm1d(6, affine=False))
    tensors = {k: torch.rand_like(v) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    there = map_names(shapes(tensors), "torch", style)
    assert there.left == ("0.num_batches_tracked", "2.num_batches_tracked")
    assert all(any(key in note for note in there.notes) for key in there.left)
    made = there.apply(tensors)
    expected = {
        "keras": {"0/gamma", "0/beta", "0/moving_mean", "0/moving_variance"},
        "flax": {"params/0/scale", "params/0/bias", "batch_stats/0/mean", "batch_stats/0/var"},
        "tf": {"0.gamma", "0.beta", "0.moving_mean", "0.moving_variance"},
    }[style]
    assert expected <= set(made)
    back = map_names(shapes(made), style, "torch").apply(made)
    model.load_state_dict(back | {k: tensors[k] for k in there.left})
    assert all(torch.equal(v, tensors[k]) for k, v in model.state_dict().items())


def test_matrices_are_no_norms() -> None:
    tensors = shapes(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)).state_dict())
    with pytest.raises(ConversionError, match=r"'0\.weight' is no norm's tensor \(2 such"):
        map_names(tensors, "torch", "keras")
    made = map_names(tensors, "torch", "keras", keep_others=True)
    assert {r.key for r in made.tensors} == {"0.weight", "0.bias", "1/gamma", "1/beta"}
    with pytest.raises(ConversionError, match="divides by the unbiased deviation"):
        map_names(tensors, "torch", "textbook")


def test_unknown_names() -> None:
    for text in ("mystery", "llama/mystery", ""):
        with pytest.raises(ConversionError, match=f"no naming '{text}'; known are llama"):
            map_names({}, text, "llama")
    with pytest.raises(ConversionError, match="none of the 1 tensors has the name of one of llama's norms"):
        map_names({"x": (3,)}, "llama", "gemma")


def test_keras_layers() -> None:
    spec = from_keras("BatchNormalization", {"axis": [3 - 4], "momentum": 0.99, "epsilon": 0.001})
    assert spec.axes == "batch" and spec.running == pytest.approx(0.01) and spec.eps == 1e-3 and spec.channel_dim == -1
    assert from_keras("LayerNormalization", {"center": False}).has_bias is False
    assert from_keras("GroupNormalization", {"groups": -1}).axes == "instance"
    assert from_keras("GroupNormalization", {"groups": 4}).groups == 4
    for kind, config, message in (
        ("LayerNormalization", {"axis": 1}, "axis=1 of LayerNormalization"),
        ("LayerNormalization", {"rms_scaling": True}, "rms_scaling"),
        ("UnitNormalization", {}, "no NormSpec for Keras's UnitNormalization"),
        ("BatchNormalization", {"momentum": 1.5}, r"momentum must be in \[0, 1\]"),
    ):
        with pytest.raises(ConversionError, match=message):
            from_keras(kind, config)


def test_momentum_is_the_other_share() -> None:
    """One update by each framework's formula."""
    old, batch, decay = 3.0, 5.0, 0.9
    assert (1 - running_momentum(decay)) * old + running_momentum(decay) * batch == pytest.approx(
        decay * old + (1 - decay) * batch
    )
