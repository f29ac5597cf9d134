"""fold: gains and biases into the linear maps that follow, exact, and refused where they are not."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit
from normkit.convert import ConversionError
from normkit.convert.fold import fold, gain
from normkit.convert.fold.proof import Widened
from normkit.reference import normalize
from normkit.spec import GEMMA
from tests.convert.check import Snapshot, apart, check_exact, trained
from tests.zoo import build

EXACT, ROUNDED = 1e-12, 1e-5


def reasons(receipt) -> dict[str, str]:
    return {refusal.name: refusal.reason for refusal in receipt.refused}


class Block(nn.Module):
    """A norm, something after it, a linear map."""

    def __init__(self, norm, between=lambda h: h, linear=None):
        super().__init__()
        self.norm, self.between = norm, between
        self.linear = linear or nn.Linear(12, 7)

    def forward(self, x):
        return self.linear(self.between(self.norm(x)))


X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))

# ---- what folds ----


@pytest.mark.parametrize(
    ("name", "folded", "untie"),
    [
        ("llama", 5, False),
        ("gemma2", 5, True),
        ("gpt2", 5, True),
        ("nemotron", 5, True),
        ("vit", 5, False),
    ],
)
def test_models_compute_the_same_after_a_fold(name, folded, untie):
    """Llama, Gemma 2 (its pre-norms), GPT-2 (fused transposed projections, head untied), and 1 + w with a bias."""
    entry = build(name)
    for _, _, module in entry.labels:
        assert all(p.detach().std() > 0 for p in module.parameters()), "gains must not all be equal"
    receipt = check_exact(partial(fold, untie=untie), entry.model, **entry.inputs)
    assert len(receipt.changed) == folded and receipt.float64.outputs < EXACT
    audited = normkit.audit(entry.model, **entry.inputs)
    for change in receipt.changed:
        norm = audited[change.name]
        stored = 1 - norm.spec.weight_offset
        module = entry.model.get_submodule(change.name)
        assert module is norm.module
        assert bool((getattr(module, norm.parameters["weight"]) == stored).all())
        if "bias" in norm.parameters:
            assert not bool(getattr(module, norm.parameters["bias"]).any())
    assert fold(entry.model, **entry.inputs).changed == (), "a second fold finds gains of one"


def test_the_receipt_says_what_was_measured():
    entry = build("gpt2")
    receipt = fold(entry.model, untie=True, **entry.inputs)
    told = receipt.to_dict()
    assert told["conversion"] == "fold" and told["float64"]["outputs"] < EXACT
    assert 0 < told["errors"]["original"]["outputs"] < ROUNDED
    assert told["float64"]["gradients"] < 1e-10
    assert any("untied" in note for note in receipt.notes) and any("lm_head.bias" in note for note in receipt.notes)
    assert entry.model.config.tie_word_embeddings is False
    receipt.undo()
    assert entry.model.config.tie_word_embeddings is True
    assert entry.model.lm_head.weight is entry.model.transformer.wte.weight and entry.model.lm_head.bias is None


def test_a_folded_model_generates_the_same_tokens():
    entry = build("llama")
    ids = entry.inputs["input_ids"][:, :5]
    before = entry.model.generate(ids, max_new_tokens=8, do_sample=False)
    fold(entry.model, **entry.inputs)
    assert torch.equal(entry.model.generate(ids, max_new_tokens=8, do_sample=False), before)


class Attends(nn.Module):
    def __init__(self, embedding, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(embedding, heads, batch_first=True)

    def forward(self, h):
        return self.attention(h, h, h)[0]


@pytest.mark.parametrize(
    ("shape", "norm", "linear"),
    [
        ((3, 5, 12), nn.LayerNorm(12), nn.Linear(12, 7, bias=False)),
        ((3, 12), nn.RMSNorm(12), nn.Linear(12, 12)),
        ((3, 5, 12), normkit.nn.RMSNorm(12, weight_offset=1.0), nn.Linear(12, 7)),
        ((3, 5, 12), normkit.nn.ScaleNorm(12), nn.Linear(12, 7)),
        ((3, 5, 12), nn.LayerNorm((5, 12)), nn.Sequential(nn.Flatten(), nn.Linear(60, 4))),
        ((3, 5, 12), nn.LayerNorm(12), Attends(12, 3)),
        ((3, 6, 11), nn.GroupNorm(3, 6), nn.Conv1d(6, 8, 3)),
        ((3, 6, 5, 7), nn.GroupNorm(2, 6), nn.Conv2d(6, 9, 3, groups=3)),
        ((3, 6, 11), nn.GroupNorm(2, 6), nn.ConvTranspose1d(6, 9, 1, groups=3)),
        ((3, 6, 11), nn.InstanceNorm1d(6, affine=True), nn.Conv1d(6, 4, 2, stride=2)),
        ((3, 6, 5, 7), normkit.nn.LayerNorm(6, channel_dim=1), nn.Conv2d(6, 4, 1)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_norms_and_linear_maps_of_other_kinds(shape, norm, linear):
    model = trained(Block(norm, linear=linear)).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert [c.name for c in check_exact(fold, model, x).changed] == ["norm"]


def test_views_casts_masks_and_token_selection_may_lie_between():
    def between(h):
        return h.transpose(0, 1).contiguous()[1:, :, None].type_as(h).expand(-1, -1, 2, -1) * 0.5

    block = trained(Block(nn.LayerNorm(12, bias=False), between)).eval()
    assert len(check_exact(fold, block, X).changed) == 1


def test_one_norm_before_several_maps_and_several_calls():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(12), nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            for _ in range(2):
                h = self.norm(x)
                x = x + self.a(h) * torch.sigmoid(self.b(h))
            return x

    model = trained(Shared()).eval()
    assert check_exact(fold, model, X).changed[0].what == "gain and bias into a, b"


def test_half_precision_is_held_to_its_own_rounding():
    entry = build("llama")
    entry.model.to(torch.bfloat16)
    receipt = fold(entry.model, **entry.inputs)
    assert len(receipt.changed) == 5 and receipt.float64.outputs < EXACT
    assert receipt.errors.exact.outputs <= 2 * receipt.errors.noise.outputs


def test_only_some():
    entry = build("llama")
    receipt = fold(entry.model, only=["model.norm"], **entry.inputs)
    assert [c.name for c in receipt.changed] == ["model.norm"] and receipt.refused == ()
    with pytest.raises(ValueError, match=r"only names nothing\.here"):
        fold(entry.model, only=["nothing.here"], **entry.inputs)


def test_lora_beside_a_linear_map_is_folded_too():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.down, self.up = nn.Linear(12, 7), nn.Linear(12, 2, bias=False), nn.Linear(2, 7, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x)) * 2.0

    block = trained(Block(nn.RMSNorm(12), linear=Adapted())).eval()
    assert len(check_exact(fold, block, X).changed) == 1


# ---- what is refused ----


def test_berts_gains_are_on_the_identity_path():
    import transformers

    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, vocab_size=31
    )
    model = trained(transformers.BertModel(config)).eval()
    snapshot = Snapshot(model)
    receipt = fold(model, input_ids=torch.randint(0, 31, (2, 7)))
    assert receipt.changed == () and len(receipt.refused) == 5
    told = reasons(receipt)
    assert told.pop("encoder.layer.1.output.LayerNorm").endswith("the model returns its output")
    assert all("residual stream" in reason for reason in told.values())
    snapshot.assert_same()


def test_output_norms_feed_the_stream():
    entry = build("gemma2")
    told = reasons(fold(entry.model, untie=True, **entry.inputs))
    assert len(told) == 4 and all("output norm" in reason for reason in told.values())


def test_norms_of_queries_and_keys():
    entry = build("qwen3")
    told = reasons(fold(entry.model, untie=True, **entry.inputs))
    assert len(told) == 4
    assert all(name.endswith(("q_norm", "k_norm")) and "queries or keys" in why for name, why in told.items())


def test_a_tied_head_is_refused_unless_untied():
    entry = build("gemma")
    assert entry.model.lm_head.weight is entry.model.model.embed_tokens.weight
    receipt = fold(entry.model, **entry.inputs)
    assert "tied to lm_head.weight; untie=True" in reasons(receipt)["model.norm"] and len(receipt.changed) == 4
    assert entry.model.lm_head.weight is entry.model.model.embed_tokens.weight


def test_experts_that_a_run_may_not_reach():
    entry = build("mixtral")
    told = reasons(fold(entry.model, **entry.inputs))
    assert all("post_attention" in name for name in told) and len(told) == 2


class Odd(nn.Module):
    """A norm and a linear map, used in some way."""

    def __init__(self, use, **parts):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)
        self.use = use
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.use(self, x)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda m, x: m.linear(F.relu(m.norm(x))), "relu in the model.*bends"),
        (lambda m, x: m.linear(F.leaky_relu(m.norm(x))), "bends"),
        (lambda m, x: m.linear(m.norm(x).roll(1, -1)), "keep the features apart"),
        (lambda m, x: m.linear(m.norm(x).transpose(-1, -2)[..., :1].expand(-1, -1, 12)), "apart|another dim"),
        (lambda m, x: m.linear(m.norm(x) * torch.sigmoid(x)), "mul in the model"),
        (lambda m, x: m.linear(m.norm(x)) + m.norm(x), "residual stream"),
        (lambda m, x: m.norm(x), "returns its output"),
        (lambda m, x: (m.linear(m.norm(x)), m.norm(x)), "returns its output"),
        (lambda m, x: m.linear(m.norm(x)) + m.linear(x), "used elsewhere too"),
        (lambda m, x: m.linear(m.norm(x)) + m.linear.weight.sum(), "used elsewhere too"),
        (lambda m, x: m.norm(x) @ x.transpose(-1, -2), "no linear map of it by a stored weight"),
        (lambda m, x: F.linear(m.norm(x), m.linear.weight.tanh()), "no linear map of it by a stored weight"),
        (lambda m, x: F.linear(m.norm(x)[x[..., 0] > 0], m.linear.weight), "routed by data"),
        (lambda m, x: F.linear(m.norm(x), m.linear.weight), "has no bias that could take"),
        (lambda m, x: m.linear(F.pad(m.norm(x), (0, 0, 1, 1))), "apart"),
    ],
)  # fmt: skip
def test_what_follows_must_be_linear_and_alone(use, reason):
    model = trained(Odd(use)).eval()
    snapshot = Snapshot(model)
    receipt = fold(model, X)
    assert receipt.changed == ()
    (refusal,) = receipt.refused
    assert re.search(reason, refusal.reason), refusal.reason
    snapshot.assert_same()


def test_a_shift_before_a_padded_convolution():
    model = trained(nn.Sequential(nn.GroupNorm(2, 6), nn.Conv1d(6, 4, 3, padding=1))).eval()
    x = torch.randn(2, 6, 9)
    assert "pads with zeros" in reasons(fold(model, x))["0"]
    with torch.no_grad():
        model[0].bias.zero_()
    assert len(check_exact(fold, model, x).changed) == 1, "a gain alone passes the padding"


def test_a_shift_before_a_transposed_convolution():
    model = trained(nn.Sequential(nn.GroupNorm(2, 6), nn.ConvTranspose1d(6, 4, 3, stride=2))).eval()
    assert "transposed" in reasons(fold(model, torch.randn(2, 6, 9)))["0"]


def test_quantized_weights():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-99, 99, (7, 12), dtype=torch.int8), requires_grad=False)

        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype))

    norm = nn.RMSNorm(12)
    with torch.no_grad():
        norm.weight.add_(torch.rand(12))
    model = Block(norm, linear=Quantized()).eval()
    assert "quantized" in reasons(fold(model, X))["norm"]


def test_norms_without_a_gain_to_fold():
    for norm, reason in (
        (nn.LayerNorm(12, elementwise_affine=False), "neither gain nor bias"),
        (nn.LayerNorm(12), "already"),
        (nn.BatchNorm1d(5), "fold_batch_norm"),
        (normkit.nn.SeeDNorm(12), "no norm that a NormSpec describes"),
    ):
        assert reason in reasons(fold(Block(norm).eval(), X))["norm"]


def test_a_gain_that_is_not_finite_or_not_its_own():
    block = trained(Block(nn.LayerNorm(12))).eval()
    with torch.no_grad():
        block.norm.weight[3] = torch.inf
    assert "not finite" in reasons(fold(block, X))["norm"]
    shared = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 12))
    trained(shared).eval()
    shared[2].weight = shared[0].weight
    told = reasons(fold(shared, X))
    assert set(told) == {"0", "2"} and all("one tensor" in why for why in told.values())


def test_float16_that_underflows_is_refused_as_a_whole():
    """Gains of 1e-5 on weights of 1e-2 leave float16: exact in float64, and not in the model."""
    block = Block(nn.RMSNorm(12), linear=nn.Linear(12, 7, bias=False)).half().eval()
    with torch.no_grad():
        block.norm.weight.copy_(torch.logspace(-6, -5, 12))
        block.linear.weight.mul_(0.01)
    snapshot = Snapshot(block)
    with pytest.raises(ConversionError, match="nothing was changed: in float16 the outputs are off by"):
        fold(block, X.half())
    snapshot.assert_same()


def test_a_wrong_fold_is_refused_by_the_proof(monkeypatch):
    """1 + w folded as if it were w."""
    right = gain._affine

    def forgets(editor, spec, weight, bias):
        return right(editor, spec.replace(weight_offset=0.0), weight, bias)

    block = trained(Block(normkit.nn.RMSNorm(12, weight_offset=1.0))).eval()
    snapshot = Snapshot(block)
    monkeypatch.setattr(gain, "_affine", forgets)
    receipt = fold(block, X)
    assert receipt.changed == () and "the proof failed: in float64 the outputs differ" in reasons(receipt)["norm"]
    snapshot.assert_same()


def test_one_wrong_fold_among_right_ones_is_left_out(monkeypatch):
    right = gain.scale_in
    model = trained(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 5))).eval()
    monkeypatch.setattr(gain, "scale_in", lambda w, s, m: right(w, s if m.module == "3" else 1 / s, m))
    receipt = check_exact(fold, model, X)
    assert [c.name for c in receipt.changed] == ["2"] and [r.name for r in receipt.refused] == ["0"]


def test_undo_after_the_parameters_were_replaced_is_refused():
    block = trained(Block(nn.LayerNorm(12))).eval()
    receipt = fold(block, X)
    block.linear.weight = nn.Parameter(block.linear.weight.detach().clone())
    snapshot = Snapshot(block)
    with pytest.raises(ConversionError, match=r"linear\.weight is another tensor now"):
        receipt.undo()
    snapshot.assert_same()


def test_arguments():
    with pytest.raises(TypeError, match="model must be"):
        fold(lambda x: x, X)
    with pytest.raises(TypeError, match="example inputs"):
        fold(Block(nn.LayerNorm(12)))
    with pytest.raises(ConversionError, match="has no values"):
        fold(nn.LayerNorm(12, device="meta"), X)
    with pytest.raises(ConversionError, match="could not be run"):
        fold(Block(nn.LayerNorm(12)), torch.randn(3, 11))


def test_the_wide_mode_takes_narrow_casts_out():
    """Gemma's norm, which rounds to float32 in its code, is then the definition to the last bits of float64."""
    norm = build("gemma").model.model.norm
    x = torch.randn(4, norm.weight.numel(), dtype=torch.float64)
    wide = copy.deepcopy(norm).double()
    exact = normalize(x, GEMMA.replace(eps=norm.eps), wide.weight)
    with Widened(), torch.no_grad():
        assert apart([wide(x)], [exact]) < 1e-15
    with torch.no_grad():
        assert apart([wide(x)], [exact]) > 1e-9


def test_a_bias_stays_where_a_map_has_no_place_for_it():
    """new_biases=False: no parameter is added; the norm keeps its bias by its gain, and padding does not matter."""
    model = trained(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4, bias=False))).eval()
    x = torch.randn(3, 8)
    names = set(model.state_dict())
    bias, gain = model[0].bias.detach().clone(), model[0].weight.detach().clone()
    receipt = check_exact(lambda m, *a: fold(m, *a, new_biases=False), model, x)
    assert "its bias stays" in receipt.changed[0].what and set(model.state_dict()) == names
    assert bool((model[0].weight == 1).all())
    torch.testing.assert_close(model[0].bias, (bias / gain).double())
    padded = trained(nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3, padding=1, bias=False))).eval()
    image = torch.randn(2, 8, 5, 5)
    assert not fold(padded, image).changed
    check_exact(lambda m, *a: fold(m, *a, new_biases=False), padded, image)
    zero = trained(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4, bias=False))).eval()
    with torch.no_grad():
        zero[0].weight[3] = 0
    (refused,) = fold(zero, x, new_biases=False).refused
    assert "its gain, having zeros, cannot divide it" in refused.reason
    plain = trained(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))).eval()
    assert fold(plain, x, new_biases=False).changed[0].what == "gain and bias into 1"
