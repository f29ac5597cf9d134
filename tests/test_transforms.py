"""torch.func, forward-mode AD, compile, export, autocast, activation checkpointing: each equal to plain eager."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from normkit import functional as F
from normkit import nn
from normkit.spec import GEMMA, TORCH_LAYER

torch.manual_seed(0)
X = torch.randn(3, 6, 4, dtype=torch.float64)
W, B = torch.randn(2, 6, dtype=torch.float64).unbind()
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]]).bool()

FUNCTIONS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, 6, w, b, channel_dim=1),
    "layer_norm_last": lambda x, w, b: F.layer_norm(x.transpose(1, 2), 6, w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, 6, w, 1e-6, bias=b, channel_dim=1, weight_offset=1.0),
    "rms_norm_groups": lambda x, w, b: F.rms_norm(x.transpose(1, 2), 6, w, 1e-6, bias=b, groups=3),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "group_norm_masked": lambda x, w, b: F.group_norm(x, 2, w, b, mask=MASK),
    "instance_norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "batch_norm_masked": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True, mask=MASK),
    "batch_norm_eval": lambda x, w, b: F.batch_norm(x, torch.zeros(6).double(), torch.ones(6).double() * 2, w, b),
}
every = pytest.mark.parametrize("name", FUNCTIONS)


@every
def test_gradcheck_and_gradgradcheck(name):
    given = [t.clone().requires_grad_() for t in (X, W, B)]
    torch.autograd.gradcheck(FUNCTIONS[name], given, check_batched_grad=True, check_forward_ad=True)
    torch.autograd.gradgradcheck(FUNCTIONS[name], given)


@every
def test_jvp_is_the_jacobian_times_the_tangent(name):
    function = FUNCTIONS[name]
    tangents = tuple(torch.randn_like(t) for t in (X, W, B))
    y, jvp = torch.func.jvp(function, (X, W, B), tangents)
    torch.testing.assert_close(y, function(X, W, B))
    jacobians = torch.autograd.functional.jacobian(function, (X, W, B))
    wanted = sum(torch.tensordot(j, t, t.dim()) for j, t in zip(jacobians, tangents, strict=True))
    torch.testing.assert_close(jvp, wanted)
    with forward_ad.dual_level():
        dual = function(*[forward_ad.make_dual(t, v) for t, v in zip((X, W, B), tangents, strict=True)])
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, wanted)


@every
def test_jacrev_jacfwd_and_hessian_agree(name):
    function = FUNCTIONS[name]
    wanted = torch.autograd.functional.jacobian(function, (X, W, B))
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        for a, b in zip(transform(function, argnums=(0, 1, 2))(X, W, B), wanted, strict=True):
            torch.testing.assert_close(a, b)

    def scalar(w):
        return function(X, w, B).pow(3).sum()

    torch.testing.assert_close(torch.func.hessian(scalar)(W), torch.autograd.functional.hessian(scalar, W))


@every
def test_vmap_is_a_loop(name):
    function = FUNCTIONS[name]
    xs, ws = torch.stack([X, 2 * X + 1]), torch.stack([W, -W])
    got = torch.func.vmap(function, in_dims=(0, 0, None))(xs, ws, B)
    torch.testing.assert_close(got, torch.stack([function(x, w, B) for x, w in zip(xs, ws, strict=True)]))

    def loss(w, x):
        return function(x, w, B).pow(2).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(W, xs)
    torch.testing.assert_close(per_sample, torch.stack([torch.func.grad(loss)(W, x) for x in xs]))


def test_training_batch_norm_under_vmap_returns_its_statistics():
    mean, var = torch.zeros(6).double(), torch.ones(6).double()

    def step(x):
        return F.batch_norm_functional(x, mean, var, W, B, training=True, momentum=0.3)

    xs = torch.stack([X, X * 2 + 1])
    got = torch.func.vmap(step)(xs)
    for i, x in enumerate(xs):
        kept = [mean.clone(), var.clone()]
        y = F.batch_norm(x, *kept, W, B, training=True, momentum=0.3)
        for a, b in zip([t[i] for t in got], [y, *kept], strict=True):
            torch.testing.assert_close(a, b)
    assert torch.equal(mean, torch.zeros(6).double()), "nothing was written in place"
    _, tangent = torch.func.jvp(lambda x: step(x).output, (X,), (torch.ones_like(X),))
    assert tangent.abs().max() < 1e-12, "a batch norm does not see a shift"


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm_groups", "group_norm_masked", "batch_norm"])
def test_compile_is_dynamic_and_full(name):
    """One compiled function serves other batch sizes, forward and backward."""
    torch._dynamo.reset()
    function = FUNCTIONS[name.replace("_masked", "")] if name == "group_norm_masked" else FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (3, 5, 2):
        x = torch.randn(batch, 6, 4, dtype=torch.float64)
        results = []
        for f in (compiled, function):
            given = [t.clone().requires_grad_() for t in (x, W, B)]
            y = f(*given)
            results.append([y, *torch.autograd.grad(y.pow(3).sum(), given)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(6),
        nn.RMSNorm(6, bias=True),
        nn.GroupNorm(2, 6, channel_dim=-1),
        nn.BatchNorm1d(6, channel_dim=-1),
        nn.build(GEMMA, 6),
    ],
    ids=lambda module: type(module).__name__,
)
def test_export_with_a_dynamic_batch(module):
    module = copy.deepcopy(module).eval()
    x = torch.randn(4, 5, 6)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    other = torch.randn(7, 5, 6)
    torch.testing.assert_close(program.module()(other), module(other))


def test_autocast_keeps_the_inputs_dtype_and_the_gradient_flows():
    """Under autocast a linear hands on bfloat16, the norm's weights stay float32: no clash, one rounding."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), nn.LayerNorm(6), nn.RMSNorm(6, rounding="before_gain"))
    x = torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
        hidden = model[0](x)
        assert hidden.dtype == torch.bfloat16 and y.dtype == torch.bfloat16
        exact = F.layer_norm(hidden.double(), 6, model[1].weight.double(), model[1].bias.double())
        torch.testing.assert_close(model[1](hidden), exact.bfloat16(), rtol=2**-7, atol=2**-8)
    y.float().pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_a_batch_once(reentrant):
    """Recomputation in the backward used to move the running statistics a second time."""
    module, plain = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    norm, norm_plain = (nn.build(TORCH_BATCH_LIKE, 6) for _ in range(2))
    x = torch.randn(5, 6, requires_grad=True)
    y = checkpoint(lambda t: norm(module(t) * 2), x, use_reentrant=reentrant)
    wanted_x = x.detach().clone().requires_grad_()
    wanted = norm_plain(plain(wanted_x) * 2)
    torch.testing.assert_close(y, wanted)
    y.pow(3).sum().backward()
    wanted.pow(3).sum().backward()
    torch.testing.assert_close(x.grad, wanted_x.grad)
    for kept, other in ((module, plain), (norm, norm_plain)):
        assert int(kept.num_batches_tracked) == 1
        assert all(torch.equal(a, b) for a, b in zip(kept.buffers(), other.buffers(), strict=True))


TORCH_BATCH_LIKE = TORCH_LAYER.replace(axes="batch", channel_dim=1, running=0.1)


def test_double_backward_twice_over():
    """A third derivative: the recorded backward measures from x, so it can be differentiated any number of times.

    (torch.layer_norm's own is wrong: it takes mean and deviation for constants by then.)
    """
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 5, dtype=torch.float64)

    def derivatives(function):
        out, grad = [], (function(x) * v).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(grad, x, create_graph=True)
            out.append(g)
            grad = (g * v).sum()
        return out

    def spelled_out(t):
        d = t - t.mean(-1, keepdim=True)
        return d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    for a, b in zip(derivatives(lambda t: F.layer_norm(t, 5)), derivatives(spelled_out), strict=True):
        torch.testing.assert_close(a, b)
