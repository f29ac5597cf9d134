"""init_for: every matrix's measured standard deviation against the published formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normkit import placement, schedule
from normkit.placement import known
from normkit.residual import (
    Attention,
    FeedForward,
    Matrix,
    Residual,
    Transformer,
    attention_roles,
    fused_attention_roles,
    init_for,
    mlp_roles,
    multihead_attention_roles,
)

from .blocks import ROLES, Mlp

DIM, HIDDEN, DEPTH = 96, 160, 12
SCALED = {"value", "output", "up", "down"}  # DeepNorm's and Sub-LN's roles by the names of our modules


def std_is(matrix, std):
    """Within five standard errors of the spread of n normal draws, std / sqrt(2n)."""
    measured = matrix.detach().double().pow(2).mean().sqrt().item()
    error = 5 * std / math.sqrt(2 * matrix.numel())
    assert abs(measured - std) <= error, f"{measured:.5f} for {std:.5f} +- {error:.5f}"


def xavier(matrix):
    return math.sqrt(2 / sum(matrix.shape))


@pytest.mark.parametrize(
    ("name", "gain"),
    [("pre", 1.0), ("post", 1.0), ("deepnorm", (8 * DEPTH) ** -0.25), ("sub", math.sqrt(math.log(2 * DEPTH)))],
)
@pytest.mark.parametrize("gated", [False, True])
def test_every_matrix_of_a_decoder(name, gain, gated):
    torch.manual_seed(0)
    model = Transformer(
        vocab=50, dim=DIM, depth=DEPTH, heads=4, kv_heads=2, ffn_dim=HIDDEN, placement=name, gated=gated
    )
    seen = set()
    for path, matrix in model.named_parameters():
        kind = path.split(".")[-2]
        if ".sublayer." not in path or "norm" in path:
            continue
        seen.add(kind)
        std_is(matrix, xavier(matrix) * (gain if kind in SCALED else 1))
    assert seen == {"query", "key", "value", "output", "up", "down"} | ({"gate"} if gated else set())


@pytest.mark.parametrize("name", ["deepnorm", "sub"])
def test_every_matrix_of_a_pair(name):
    torch.manual_seed(0)
    model = Transformer(
        vocab=50,
        dim=DIM,
        depth=6,
        encoder_depth=6,
        heads=4,
        ffn_dim=HIDDEN,
        placement=name,
        gated=False,
        kind="encoder_decoder",
    )
    gains = {
        "deepnorm": {"encoder": 0.87 * (6**4 * 6) ** (-1 / 16), "stack": (12 * 6) ** -0.25},
        "sub": {"encoder": math.sqrt(math.log(18) * math.log(12) / 3), "stack": math.sqrt(math.log(18))},
    }[name]
    for path, matrix in model.named_parameters():
        side, kind = path.split(".")[0], path.split(".")[-2]
        if ".sublayer." not in path or "norm" in path:
            continue
        free = kind not in SCALED or (name == "sub" and ".cross." in path)
        std_is(matrix, xavier(matrix) * (1 if free else gains[side]))


def test_fixup():
    torch.manual_seed(0)
    model = Transformer(vocab=50, dim=DIM, depth=8, heads=4, ffn_dim=HIDDEN, placement="fixup", gated=False)
    for path, p in model.named_parameters():
        kind = path.split(".")[-2]
        if path.endswith(("branch_scale",)):
            assert p.item() == 1
        elif path.endswith(("input_bias", "output_bias")):
            assert p.item() == 0
        elif ".sublayer." in path and "norm" not in path:
            if kind in {"output", "down"}:
                assert not p.any()
            else:
                std_is(p, xavier(p) * (16**-0.5 if kind in {"value", "up"} else 1))
    x = torch.randn(2, 5, DIM)
    assert torch.equal(model.stack(x), x), "every branch starts at zero"


@pytest.mark.parametrize(
    ("base", "std"),
    [("xavier_uniform", math.sqrt(2 / (DIM + HIDDEN))), ("kaiming_normal", math.sqrt(2 / DIM)), (0.02, 0.02)],
)
def test_base_distributions(base, std):
    torch.manual_seed(0)
    ffn = FeedForward(DIM, HIDDEN, gated=False)
    gains = init_for("deepnorm", 12, ffn, base=base)
    assert gains == {"up.weight": 96**-0.25, "down.weight": 96**-0.25}
    std_is(ffn.up.weight, std * 96**-0.25)


def test_keep_multiplies_what_is_there():
    ffn = FeedForward(DIM, HIDDEN, gated=False)
    before = ffn.up.weight.clone()
    init_for("sub", 12, ffn, base="keep")
    torch.testing.assert_close(ffn.up.weight, before * math.sqrt(math.log(24)))


def test_roles_decide_and_not_names():
    """A module whose names lie: only the declared roles count."""

    class Lying(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 64)

        def matrix_roles(self):
            return attention_roles("v_proj", "v_proj", "fc1", "fc1")[1:3]

    torch.manual_seed(0)
    module = Lying()
    assert init_for("deepnorm", 12, module) == {"v_proj.weight": 1.0, "fc1.weight": 96**-0.25}
    std_is(module.fc1.weight, math.sqrt(1 / 64) * 96**-0.25)
    std_is(module.v_proj.weight, math.sqrt(1 / 64))


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_projection_is_scaled_by_slices(transposed):
    torch.manual_seed(0)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Module(), nn.Linear(64, 64)
            self.qkv.weight = nn.Parameter(torch.zeros(64, 128) if transposed else torch.zeros(128, 64))

    module = Fused()
    roles = fused_attention_roles("qkv", "out", (64, 32, 32), transposed=transposed)
    init_for("deepnorm", 12, module, roles=roles)
    weight = module.qkv.weight.T if transposed else module.qkv.weight
    for rows, gain in ((weight[:64], 1), (weight[64:96], 1), (weight[96:], 96**-0.25)):
        std_is(rows, xavier(rows) * gain)


@pytest.mark.parametrize("kdim", [None, 48])
def test_torch_multihead_attention(kdim):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(64, 4, kdim=kdim, vdim=kdim)
    init_for("deepnorm", 12, attention, roles=multihead_attention_roles(attention))
    value = attention.in_proj_weight[128:] if kdim is None else attention.v_proj_weight
    query = attention.in_proj_weight[:64] if kdim is None else attention.q_proj_weight
    std_is(value, xavier(value) * 96**-0.25)
    std_is(query, xavier(query))
    std_is(attention.out_proj.weight, math.sqrt(1 / 64) * 96**-0.25)


def test_modules_of_transformers():
    """The adapters' defaults fit Llama's modules; GPT-2 stores its fused projection (in, out)."""
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=9,
            pad_token_id=0,
        )
    ).model.layers[0]
    beta = 96**-0.25
    init_for("deepnorm", 12, llama.self_attn, roles=attention_roles())
    init_for("deepnorm", 12, llama.mlp, roles=mlp_roles(gate="gate_proj"))
    for module, gain in (
        (llama.self_attn.q_proj, 1),
        (llama.self_attn.k_proj, 1),
        (llama.self_attn.v_proj, beta),
        (llama.self_attn.o_proj, beta),
        (llama.mlp.gate_proj, 1),
        (llama.mlp.up_proj, beta),
        (llama.mlp.down_proj, beta),
    ):
        std_is(module.weight, xavier(module.weight) * gain)
    gpt2 = transformers.GPT2Model(
        transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=9, bos_token_id=1, eos_token_id=1)
    ).h[0]
    roles = fused_attention_roles("c_attn", "c_proj", (64, 64, 64), transposed=True)
    init_for("deepnorm", 12, gpt2.attn, roles=roles)
    init_for("deepnorm", 12, gpt2.mlp, roles=mlp_roles("c_fc", "c_proj", transposed=True))
    for matrix, gain in ((gpt2.attn.c_attn.weight[:, :64], 1), (gpt2.attn.c_attn.weight[:, 128:], beta)):
        std_is(matrix, xavier(matrix) * gain)
    std_is(gpt2.mlp.c_fc.weight, xavier(gpt2.mlp.c_fc.weight) * beta)
    x = torch.randn(2, 3, 64)
    wrapped = Residual(gpt2.mlp, "sub", 64, depth=12, roles=mlp_roles("c_fc", "c_proj", transposed=True))
    inner = wrapped.sublayer.c_proj.norm
    assert inner.features == (256,)
    h = inner(gpt2.mlp.act(gpt2.mlp.c_fc(wrapped.input_norm(x))))
    wrapped.eval()
    torch.testing.assert_close(wrapped(x), x + wrapped.sublayer.c_proj.projection(h))
    assert init_for("sub", 12, wrapped)["sublayer.c_proj.projection.weight"] == math.sqrt(math.log(24))


@pytest.mark.parametrize("name", known())
def test_init_for_of_a_model_is_repeatable(name):
    plan = schedule(name, 4)
    model = nn.ModuleList(
        Residual(module, plan.branch(n, kind), 16, kind=kind)
        for n in range(1, 5)
        for module, kind in ((Attention(16, 2), "attention"), (FeedForward(16, 32), "ffn"))
    )
    results = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        gains = init_for(name, 4, model, generator=generator)
        results.append([p.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(gains) == 4 * 7
    expected = placement(name, depth=4, layer=1, kind="ffn")
    assert gains["1.sublayer.down.weight"] == (0 if expected.zero_roles else expected.init_gain)
    assert gains["0.sublayer.query.weight"] == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: init_for("deepnorm", None, FeedForward(4, 8)), "needs depth"),
        (lambda: init_for("prenorm", 4, FeedForward(4, 8)), "unknown placement"),
        (lambda: init_for("deepnorm", 4, Mlp(4, 8)), "Mlp declares no such roles"),
        (lambda: init_for("deepnorm", 4, FeedForward(4, 8), base="normal"), "base must be"),
        (lambda: init_for("pre", 4, Residual(FeedForward(4, 8), "post", 4)), "was asked for pre"),
        (
            lambda: init_for("deepnorm", 6, Residual(FeedForward(4, 8), "deepnorm", 4, depth=12)),
            "built with gain 0.319.*depth or stack differ",
        ),
        (lambda: init_for("pre", 4, Residual(Mlp(4, 8), "pre", 4), roles=ROLES), "roles= goes with a single sublayer"),
        (lambda: init_for("deepnorm", 4, Mlp(4, 8), roles=mlp_roles("up", "down")), "names 'up.weight', which Mlp"),
        (
            lambda: init_for("deepnorm", 4, Mlp(4, 8), roles=[Matrix(path="fc1.bias", role="ffn_in")]),
            r"needs a matrix; 'fc1.bias' has shape \(8,\)",
        ),
        (
            lambda: init_for("deepnorm", 4, Mlp(4, 8), roles=[Matrix(path="fc1.weight", role="ffn_in", stop=9)]),
            "takes outputs 0:9 of 'fc1.weight', which has 8",
        ),
        (
            lambda: init_for("deepnorm", 4, Mlp(4, 8), roles=[Matrix(path="fc1.weight", role="first")]),
            "role must be one of 'query'",
        ),
        (lambda: fused_attention_roles("a", "b", (4, 4)), "sizes must be"),
        (lambda: init_for(schedule("mix", 4), 4, FeedForward(4, 8)), "a Schedule differs by layer"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_types():
    with pytest.raises(TypeError, match=r"must hold normkit\.residual\.Matrix"):
        init_for("deepnorm", 4, Mlp(4, 8), roles=["fc1.weight"])
    with pytest.raises(TypeError, match=r"roles need a sublayer that is a torch\.nn\.Module"):
        Residual(lambda x: x, "pre", 4, roles=ROLES)
