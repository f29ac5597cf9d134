"""No gradient and no transform is lost: double backward, functorch, forward mode, compile, export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normkit import ops
from tests.ops.test_rows import randn

MEAN, VAR = randn(4, seed=9, dtype=torch.float64), randn(4, seed=8, dtype=torch.float64).abs() + 0.5


def first(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


# name: (operator, its plain form, shape of x and of a second input or None, parameter size)
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...], bool]] = {
    "rms_norm": (lambda x, w, b: ops.rms_norm(x, w, b, 1e-6, 1.0),
                 lambda x, w, b: ops.rms_norm_reference(x, w, b, 1e-6, 1.0), (3, 4), False),
    "layer_norm": (ops.layer_norm, ops.layer_norm_reference, (3, 4), False),
    "add_rms_norm": (ops.add_rms_norm, ops.add_rms_norm_reference, (3, 4), True),
    "add_layer_norm": (ops.add_layer_norm, ops.add_layer_norm_reference, (3, 4), True),
    "gated_rms_norm": (lambda x, z, w, b: ops.gated_rms_norm(x, z, w),
                       lambda x, z, w, b: ops.gated_rms_norm_reference(x, z, w), (3, 4), True),
    "gated_before": (lambda x, z, w, b: ops.gated_rms_norm(x, z, w, silu=False, gate_before=True),
                     lambda x, z, w, b: ops.gated_rms_norm_reference(x, z, w, silu=False, gate_before=True),
                     (3, 4), True),
    "group_norm": (lambda x, w, b: ops.group_norm(x, w, b, 2),
                   lambda x, w, b: ops.group_norm_reference(x, w, b, 2), (2, 4, 3, 2), False),
    "instance_norm": (ops.instance_norm, lambda x, w, b: ops.group_norm_reference(x, w, b, 4), (2, 4, 3, 2), False),
    "batch_norm_train": (lambda x, w, b: ops.batch_norm_train(x, w, b)[0],
                         lambda x, w, b: ops.batch_norm_train_reference(x, w, b)[0], (2, 4, 3, 2), False),
    "batch_norm": (lambda x, w, b: ops.batch_norm(x, MEAN.to(x.dtype), VAR.to(x.dtype), w, b),
                   lambda x, w, b: ops.batch_norm_reference(x, MEAN.to(x.dtype), VAR.to(x.dtype), w, b),
                   (2, 4, 3, 2), False),
    "channel_layer_norm": (ops.channel_layer_norm, ops.channel_layer_norm_reference, (2, 4, 3, 2), False),
}  # fmt: skip


def inputs_of(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    _, _, shape, second = CASES[name]
    inputs = [randn(*shape, dtype=dtype)] + ([randn(*shape, dtype=dtype, seed=1)] if second else [])
    return [*inputs, randn(4, dtype=dtype, seed=2), randn(4, dtype=dtype, seed=3)]


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    f = CASES[name][0]
    inputs = [t.requires_grad_() for t in inputs_of(name)]
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case[3]])
def test_a_recorded_gradient_where_one_input_is_computed_from_another(name: str) -> None:
    """A gradient that arrived through both counted twice (gradgradcheck alone does not see it)."""
    op = CASES[name][0]
    x, w = (randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 4), (4,)))

    def call(x: Tensor, w: Tensor, second: Callable[[Tensor], Tensor]) -> Tensor:
        return first(op(x, second(x), w * x[0].exp(), None))

    for second in (lambda t: t, lambda t: t.sin()):
        y = call(x, w, second).square().sum()
        plain = torch.autograd.grad(y, (x, w), retain_graph=True)
        recorded = torch.autograd.grad(y, (x, w), create_graph=True)
        for a, b in zip(recorded, plain, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        assert torch.autograd.gradgradcheck(lambda a, b, s=second: call(a, b, s), (x, w))


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_records_all_that_is_computed_again(name: str) -> None:
    """It is computed again when the norm's backward unpacks what it saved: with recording on."""
    op, _, shape, two = CASES[name]
    tensors = [randn(*shape, seed=i).requires_grad_() for i in range(2 if two else 1)]
    n = shape[1]
    parameters = [randn(n, seed=i + 5).requires_grad_() for i in range(2)]

    def block(*inputs: Tensor) -> Tensor:
        return first(op(*(t.sin() for t in inputs[:-2]), *inputs[-2:]))  # the norm comes last: its backward is first

    inputs = (*tensors, *parameters)
    expected = torch.autograd.grad(block(*inputs).sum(), inputs, allow_unused=True)
    got = torch.autograd.grad(checkpoint(block, *inputs, use_reentrant=False).sum(), inputs, allow_unused=True)  # type: ignore[union-attr]
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_third_derivative_exists(name: str) -> None:
    f, plain = CASES[name][:2]
    results = []
    for function in (f, plain):
        inputs = [t.requires_grad_() for t in inputs_of(name)]
        value = first(function(*inputs)).pow(3).sum()
        for _ in range(3):
            (d,) = torch.autograd.grad(value, inputs[0], create_graph=True)
            value = d.pow(2).sum()
        results.append(d.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", CASES)
def test_functorch_and_forward_mode(name: str) -> None:
    f, plain = CASES[name][:2]
    inputs = tuple(inputs_of(name))
    tangents = tuple(randn(*t.shape, seed=4, dtype=torch.float64) for t in inputs)
    for a, b in zip(
        torch.func.jvp(lambda *t: first(f(*t)), inputs, tangents),
        torch.func.jvp(lambda *t: first(plain(*t)), inputs, tangents),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert torch.func.jvp(lambda *t: first(f(*t)), inputs, tangents)[1].abs().sum() > 0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], tangents[0])
        tangent = torch.autograd.forward_ad.unpack_dual(first(f(dual, *inputs[1:]))).tangent
        assert tangent is not None and tangent.abs().sum() > 0
    batch = torch.stack([inputs[0], inputs[0] * 2 + 1])
    mapped = torch.vmap(lambda x: first(f(x, *inputs[1:])))(batch)
    torch.testing.assert_close(mapped, torch.stack([first(f(x, *inputs[1:])) for x in batch]))
    jac = torch.func.jacrev(lambda x: first(f(x, *inputs[1:])))(inputs[0])
    torch.testing.assert_close(jac, torch.func.jacfwd(lambda x: first(plain(x, *inputs[1:])))(inputs[0]))
    grad = torch.func.grad(lambda x: first(f(x, *inputs[1:])).pow(2).sum())(inputs[0])
    leaf = inputs[0].clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(first(f(leaf, *inputs[1:])).pow(2).sum(), leaf)[0])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compile_keeps_the_operator(name: str, dynamic: bool) -> None:
    f = CASES[name][0]
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return torch._dynamo.lookup_backend("aot_eager")(graph, _)

    compiled = torch.compile(f, fullgraph=True, backend=backend, dynamic=dynamic)
    inputs = inputs_of(name, torch.float32)
    with torch.no_grad():
        assert torch.equal(first(compiled(*inputs)), first(f(*inputs)))
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    a, b = first(compiled(*mine)), first(f(*theirs))
    assert torch.equal(a, b)
    g = randn(*a.shape, seed=5)
    for d, e in zip(
        torch.autograd.grad(a, mine, g, allow_unused=True), torch.autograd.grad(b, theirs, g, allow_unused=True),
        strict=True,
    ):  # fmt: skip
        assert (d is None) == (e is None)
        if d is not None and e is not None:
            assert torch.equal(d, e)
    if ops.LOADED:
        assert any("normkit" in s for s in seen), seen


class Net(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        _, _, shape, self.second = CASES[name]
        self.mix = torch.nn.Conv2d(4, 4, 1) if len(shape) == 4 else torch.nn.Linear(4, 4)
        self.weight, self.bias = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        return first(CASES[self.name][0](*((h, x) if self.second else (h,)), self.weight, self.bias))


@pytest.mark.parametrize("name", CASES)
def test_export_keeps_the_operator_and_trains(name: str) -> None:
    torch.manual_seed(0)
    net = Net(name)
    x = inputs_of(name, torch.float32)[0]
    exported = torch.export.export(net, (x,), strict=False).module()
    if ops.LOADED:
        assert "normkit" in str(exported.graph)
    assert torch.equal(exported(x), net(x))
    target = randn(*x.shape, seed=6)
    optimizer = torch.optim.SGD(exported.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = (exported(x) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for n, p in exported.named_parameters() if not (n == "bias" and "gate" in name))


def test_checkpoint_and_meta() -> None:
    x, w = randn(5, 16).requires_grad_(), randn(16, seed=1).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda x: ops.layer_norm(x, w), x, use_reentrant=False)
    grads = torch.autograd.grad(y.pow(2).sum(), (x, w))
    for a, b in zip(grads, torch.autograd.grad(ops.layer_norm(x, w).pow(2).sum(), (x, w)), strict=True):
        assert torch.equal(a, b)
    assert ops.rms_norm(x.to("meta"), w.to("meta")).shape == x.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.rms_norm(x, w).dtype == torch.float32
