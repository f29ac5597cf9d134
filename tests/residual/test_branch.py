"""Residual: the equation of every placement, fused and not, what passes through, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from normkit import NormSpec, Placement, placement
from normkit.nn import RMSNorm
from normkit.placement import known
from normkit.residual import FeedForward, Residual, ResidualStack, Stream, mlp_roles, multihead_attention_roles
from normkit.spec import GEMMA, LLAMA

from .blocks import ROLES, Mlp, formulas, layer_norm, mlp, scramble

DIM, HIDDEN, DEPTH = 12, 20, 8
SINGLE = [name for name in known() if name != "resi_dual"]


def branch(name, layer=2, **arguments):
    torch.manual_seed(0)
    options = {"depth": DEPTH, "layer": layer, "kind": "ffn", "roles": ROLES, "dtype": torch.float64} | arguments
    made = Residual(Mlp(DIM, HIDDEN), name, DIM, **options)
    scramble(made)
    return made


def inputs(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(2, 3, DIM, dtype=dtype)


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("name", SINGLE)
def test_equation_and_gradients(name, layer):
    """Values and every gradient against straight-line float64 code."""
    made, x = branch(name, layer), inputs().requires_grad_()
    want = formulas(DEPTH, layer)[name](x, made)
    y = made(x)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    target = torch.randn_like(want)
    wanted = torch.autograd.grad((want * target).sum(), [x, *made.parameters()])
    got = torch.autograd.grad((y * target).sum(), [x, *made.parameters()])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", known())
def test_stack_carries_the_pending_branch(name, fuse):
    """Four branches in a row with a final norm: values and gradients of the equations, one after the other."""
    made = [branch(name, n, fuse=fuse) for n in (1, 2, 3, 4)]
    final = nn.LayerNorm(DIM, dtype=torch.float64)
    scramble(final)
    x = inputs().requires_grad_()
    stack = ResidualStack(made, final)
    got = stack(x)
    if name == "resi_dual":
        second, want = x, x
        for r in made:
            out = mlp(want, r.sublayer)
            second, want = second + out, layer_norm(want + out, r.stream_norm)
        want = want + layer_norm(second, final)
    else:
        want = x
        for n, r in enumerate(made, 1):
            want = formulas(DEPTH, n)[name](want, r)
        want = layer_norm(want, final)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    # Random targets, since a normalized output has the same sum of squares whatever is before its norm.
    target = torch.randn_like(want)
    found, wanted = (torch.autograd.grad((y * target).sum(), [x, *stack.parameters()]) for y in (got, want))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [True, False])
def test_parallel(shared):
    torch.manual_seed(0)
    made = Residual(Mlp(DIM, HIDDEN), "parallel", DIM, parallel=Mlp(DIM, 9), shared_norm=shared, dtype=torch.float64)
    scramble(made)
    x = inputs()
    other = made.input_norm if shared else made.parallel_norm
    want = x + mlp(layer_norm(x, made.input_norm), made.sublayer) + mlp(layer_norm(x, other), made.parallel)
    torch.testing.assert_close(made(x), want, rtol=1e-12, atol=1e-12)


def test_fused_branches_call_the_norm_with_residual():
    """The pending output reaches the next norm as residual=, not through an add of its own."""
    seen = []

    class Seeing(RMSNorm):
        def forward(self, input, *, residual=None):
            seen.append(residual is not None)
            return super().forward(input, residual=residual)

    made = [Residual(Mlp(DIM, HIDDEN), "pre", DIM, norm=lambda d: Seeing(d, dtype=torch.float64)) for _ in range(3)]
    ResidualStack(made, Seeing(DIM, dtype=torch.float64))(inputs())
    assert seen == [False, True, True, True]


def test_a_norm_may_be_replaced():
    """By one that takes no residual=: what is fused follows the module that is there."""
    blocks = [branch("pre", n) for n in (1, 2)]
    stack = ResidualStack(blocks, nn.LayerNorm(DIM, dtype=torch.float64))
    want = stack(inputs())
    for owner, name in ((blocks[1], "input_norm"), (stack, "final_norm")):
        plain = nn.LayerNorm(DIM, dtype=torch.float64)
        plain.load_state_dict(getattr(owner, name).state_dict())
        setattr(owner, name, plain)
        assert not owner.fuses(name)
    torch.testing.assert_close(stack(inputs()), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SINGLE)
def test_compile(name):
    made, x = branch(name), inputs()
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), made(x), rtol=1e-12, atol=1e-12)


def test_compile_of_a_stack():
    made = ResidualStack([branch("resi_dual", n) for n in (1, 2)], nn.LayerNorm(DIM, dtype=torch.float64))
    x = inputs()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(made, fullgraph=True, backend="aot_eager")(x), made(x))


@pytest.mark.parametrize("name", known())
def test_state_dict_pickle_and_copy(name):
    made = branch(name)
    other = Residual(Mlp(DIM, HIDDEN), name, DIM, depth=DEPTH, layer=2, kind="ffn", roles=ROLES, dtype=torch.float64)
    other.load_state_dict(made.state_dict())
    x = Stream(inputs())
    want = made.step(x)[0].settle()
    for twin in (other, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(twin.step(x)[0].settle(), want)
    assert len(copy.deepcopy(made).state_dict()) == len(made.state_dict())


def test_extra_arguments_and_tuples_pass_through():
    def sublayer(x, mask, *, cache):
        return x * mask, {"cache": cache}, None

    y, cache, weights = Residual(sublayer, "none")(inputs(), 2.0, cache=7)
    torch.testing.assert_close(y, 3 * inputs())
    assert cache == {"cache": 7} and weights is None


def test_dropout_and_drop_path():
    p = 0.3
    ones = Residual(torch.ones_like, "none", dropout=p)
    torch.manual_seed(0)
    x = torch.zeros(400, 50)
    kept = ones(x)
    assert kept.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    assert kept.mean() == pytest.approx(1, abs=0.02)
    path = Residual(torch.ones_like, "none", drop_path=p)
    rows = path(x)
    assert all(len(row.unique()) == 1 for row in rows), "a sample is dropped as a whole"
    assert rows.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    assert (rows[:, 0] == 0).double().mean() == pytest.approx(p, abs=0.08)
    assert torch.equal(path.eval()(x), torch.ones_like(x))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["pre", "post", "sandwich", "output", "deepnorm", "resi_dual", "rezero"])
def test_float32_stream_of_a_bfloat16_branch(name, fuse):
    """The stream keeps float32 to the end; the branches see bfloat16; the sum is nearer to float64 than bfloat16's."""
    torch.manual_seed(0)

    def stack(dtype, stream_dtype):
        torch.manual_seed(0)
        blocks = [
            Residual(
                Mlp(DIM, HIDDEN, dtype),
                name,
                DIM,
                norm=NormSpec(centered=False),
                depth=DEPTH,
                stream_dtype=stream_dtype,
                fuse=fuse,
                dtype=torch.float32 if stream_dtype else dtype,
            )
            for _ in range(DEPTH)
        ]
        final = RMSNorm(DIM, dtype=dtype) if placement(name, depth=DEPTH).final_norm else None
        return ResidualStack(blocks, final)

    x = inputs(torch.bfloat16) * 4
    exact = stack(torch.float64, None)
    scramble(exact)
    wide, narrow = stack(torch.bfloat16, torch.float32), stack(torch.bfloat16, None)
    for made in (wide, narrow):
        for (key, value), (_, source) in zip(made.state_dict().items(), exact.state_dict().items(), strict=True):
            source.copy_(source.bfloat16())
            value.copy_(source)
            assert key
    seen = []
    handles = [b.sublayer.register_forward_pre_hook(lambda m, a: seen.append(a[0].dtype)) for b in wide.branches]
    stream = Stream(x)
    for b in wide.branches:
        stream, _ = b.step(stream)
        assert stream.x.dtype == torch.float32
    for h in handles:
        h.remove()
    assert set(seen) == {torch.bfloat16}
    want = exact(x.double())
    errors = [(made(x).double() - want).abs().mean().item() for made in (wide, narrow)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", ["pre", "post", "deepnorm", "sandwich"])
def test_autocast_keeps_the_stream_in_float32(name):
    made = [Residual(Mlp(DIM, HIDDEN, torch.float32), name, DIM, depth=DEPTH) for _ in range(3)]
    stream, x = Stream(inputs(torch.float32)), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for r in made:
            stream, _ = r.step(stream)
            assert stream.x.dtype == torch.float32
    torch.testing.assert_close(stream.settle(), ResidualStack(made)(x), rtol=0.05, atol=0.05)


def test_norms_of_any_spec():
    x = inputs()
    for spec in (LLAMA, GEMMA):
        made = Residual(Mlp(DIM, HIDDEN), "pre", DIM, norm=spec, dtype=torch.float64)
        scramble(made)
        gain = made.input_norm.weight + spec.weight_offset
        h = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain
        torch.testing.assert_close(made(x), x + mlp(h, made.sublayer), rtol=1e-12, atol=1e-12)


def test_channels_first():
    """Convolutions with LayerScale over dim 1."""
    spec = NormSpec(channel_dim=1, has_bias=True)
    made = Residual(nn.Conv2d(6, 6, 3, padding=1), "layerscale", 6, norm=spec, depth=12)
    x = torch.randn(2, 6, 5, 5)
    h = made.input_norm(x)
    torch.testing.assert_close(made(x), x + 0.1 * made.sublayer(h))


def test_own_placement():
    """A wiring that no table has: an input norm and a stream norm with a factor on the identity path."""
    wiring = Placement(name="mine", input_norm=True, stream_norm=True, alpha=4.0)
    made = Residual(Mlp(DIM, HIDDEN), wiring, DIM, dtype=torch.float64)
    scramble(made)
    x = inputs()
    want = layer_norm(4 * x + mlp(layer_norm(x, made.input_norm), made.sublayer), made.stream_norm)
    torch.testing.assert_close(made(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "prenorm", "dim": 4}, "unknown placement 'prenorm'"),
        ({"placement": "pre"}, "needs dim, the number of features"),
        ({"placement": "layerscale", "dim": None}, "needs dim"),
        ({"placement": "deepnorm", "dim": 4}, "needs depth"),
        ({"placement": "scaled", "dim": 4}, "needs layer"),
        ({"placement": "pre", "dim": 4, "norm": lambda d: nn.LayerNorm(5)}, r"norm over \(5,\).*needs \(4,\)"),
        ({"placement": "sub", "dim": 4, "depth": 2}, "declare it with roles="),
        ({"placement": "normformer", "dim": 4, "kind": "attention"}, r"wants head_scale inside Linear"),
        ({"placement": "pre", "dim": 4, "dropout": 1.0}, "dropout must be a probability"),
        ({"placement": "pre", "dim": 4, "drop_path": -0.1}, "drop_path must be a probability"),
        ({"placement": "post", "dim": 4, "parallel": nn.Linear(4, 4)}, "needs an input norm alone"),
        ({"placement": "pre", "dim": 4, "built_in": ("outer",)}, "built_in may name"),
        ({"placement": "pre", "dim": 4, "roles": mlp_roles("fc1", "fc2")}, "does not have as a parameter"),
    ],
)
def test_bad_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        Residual(nn.Linear(4, 4), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sublayer": 3}, "sublayer must be callable"),
        ({"sublayer": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}, "norm must be a NormSpec or a function"),
    ],
)
def test_bad_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        Residual(placement="pre", dim=4, **arguments)


def test_bad_calls():
    with pytest.raises(ValueError, match=r"must keep the shape of its input, \(2, 4\); it returned \(2, 5\)"):
        Residual(nn.Linear(4, 5), "pre", 4)(torch.randn(2, 4))
    with pytest.raises(ValueError, match="it returned dict"):
        Residual(lambda x: {}, "none")(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"x has shape \(2, 5\); dim -1 must have 4 features"):
        Residual(nn.Linear(4, 4), "pre", 4)(torch.randn(2, 5))
    with pytest.raises(TypeError, match="floating point"):
        Residual(nn.Linear(4, 4), "pre", 4)(torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="keeps a second stream"):
        Residual(nn.Linear(4, 4), "resi_dual", 4)(torch.randn(2, 4))
    with pytest.raises(ValueError, match="give final_norm"):
        ResidualStack([Residual(nn.Linear(4, 4), "resi_dual", 4)])(torch.randn(2, 4))


def test_multihead_attention_has_no_place_for_an_inner_norm():
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="MultiheadAttention does not call its output projection"):
        Residual(attention, "sub", 8, depth=2, roles=multihead_attention_roles(attention))


def test_inner_norm_that_is_built_in():
    made = Residual(nn.Linear(4, 4), "sub", 4, depth=2, built_in=("inner",))
    assert not any("sublayer" in n and "norm" in n for n, _ in made.named_modules())
    assert isinstance(Residual(FeedForward(4, 8), "sub", 4, depth=2).sublayer.inner_norm, nn.Module)
