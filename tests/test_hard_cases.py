"""One suite of hard cases over the catalog of all norms: a norm is tested by adding its line there."""

import copy
import inspect

import pytest
import torch

from normkit import nn as normkit_nn
from normkit.nn.catalog import CATALOG, catalog

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
every = pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)


def trained(module):
    """Gains and biases that are not ones and zeros."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return module


def double(module):
    return copy.deepcopy(module).double()


def results(y):
    return [t for t in torch.utils._pytree.tree_leaves(y) if isinstance(t, torch.Tensor)]


def run(module, inputs):
    """Outputs, and gradients of inputs and parameters for a fixed cotangent."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = results(module(*inputs))
    generator = torch.Generator().manual_seed(3)
    total = sum((t.double() * torch.randint(-2, 3, t.shape, generator=generator)).sum() for t in y)
    wanted = [*inputs, *module.parameters()]
    if not total.requires_grad:
        return y, []
    return y, torch.autograd.grad(total, wanted, allow_unused=True)


def check_against_float64(module, inputs, units, what, floor=1e-30):
    """Outputs within ``units`` of the dtype's spacing at the largest magnitude of each output and gradient."""
    exact = double(module)  # before the run moves any state
    ours, truth = run(module, inputs), run(exact, [x.double() for x in inputs])
    for kind, a, b in zip(("output", "gradient"), ours, truth, strict=True):
        for i, (value, wanted) in enumerate(zip(a, b, strict=True)):
            assert (value is None) == (wanted is None)
            if value is None or value.numel() == 0:
                continue
            assert torch.isfinite(value).all(), f"{what}: {kind} {i} is not finite"
            limit = units * ULP[value.dtype] * wanted.abs().max().clamp_min(floor)
            error = (value.double() - wanted).abs().max()
            assert error <= limit, f"{what}: {kind} {i} is off by {error:.3g}, {error / limit * units:.3g} units"


def test_every_public_module_is_in_the_catalog():
    classes = {type(entry.make()) for entry in CATALOG}
    public = {getattr(normkit_nn, name) for name in normkit_nn.__all__}
    modules = {c for c in public if inspect.isclass(c) and issubclass(c, torch.nn.Module)}
    assert modules <= classes, f"add to normkit.nn.catalog: {sorted(c.__name__ for c in modules - classes)}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every
def test_ordinary_input_follows_float64(entry, dtype):
    # 16 units of float32 sums of some 60 terms, a half-precision gain may be met twice on the way back
    units = {torch.float64: 64, torch.float32: 32}.get(dtype, 4)
    check_against_float64(trained(entry.make(dtype)), entry.inputs(dtype), units, entry.name)


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every
def test_every_pair_of_dtypes(entry, dtype, x_dtype):
    module = trained(entry.make(dtype))
    exact = double(module)
    y = results(module(*entry.inputs(x_dtype)))
    wanted = results(exact(*[x.double() for x in entry.inputs(x_dtype)]))
    for value, truth in zip(y, wanted, strict=True):
        assert value.dtype == x_dtype, "the output has the input's dtype"
        limit = 8 * max(ULP[x_dtype], ULP[dtype] if "frozen" in entry.name or "first" in entry.name else ULP[x_dtype])
        torch.testing.assert_close(value.double(), truth, rtol=limit, atol=limit)


@every
def test_one_row_is_the_same_alone(entry):
    module = trained(entry.make(torch.float32)).eval()
    inputs = entry.inputs(torch.float32)
    whole = results(module(*inputs))
    alone = results(module(*[x.narrow(entry.batch_dim, 0, 1) for x in inputs]))
    for a, b in zip(whole, alone, strict=True):  # eager torch may sum in another order: a few units
        torch.testing.assert_close(a.narrow(entry.batch_dim, 0, 1), b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 7, 13, 15])
@pytest.mark.parametrize("index", range(len(CATALOG)), ids=[entry.name for entry in CATALOG])
def test_widths_of_one_odd_and_prime(index, width):
    entry = catalog(width, 5 if width == 15 else 1)[index]
    inputs, floor = entry.inputs(torch.float32), 1e-30
    if width <= 2:  # the gradient is then a difference of equal terms, of order 1 for inputs of order 1
        inputs, floor = [x + x.sign() for x in inputs], 1.0
    check_against_float64(trained(entry.make(torch.float32)), inputs, 64, f"{entry.name} {width}", floor)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every
def test_an_empty_batch(entry, training):
    module = trained(entry.make(torch.float32)).train(training)
    before = copy.deepcopy(module.state_dict())
    inputs = [x.narrow(entry.batch_dim if x.dim() > entry.batch_dim else 0, 0, 0) for x in entry.inputs(torch.float32)]
    y, gradients = run(module, inputs)
    assert y[0].numel() == 0 and y[0].shape[entry.batch_dim] == 0
    assert all(g is None or torch.equal(g, torch.zeros_like(g)) for g in gradients)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"an empty batch changed {name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@every
def test_rows_of_zeros(entry, dtype):
    module = trained(entry.make(dtype))
    inputs = [torch.zeros_like(x) for x in entry.inputs(dtype)]
    for ours, truth in zip(run(module, inputs), run(double(module), [x.double() for x in inputs]), strict=True):
        for value, wanted in zip(ours, truth, strict=True):
            assert torch.isfinite(wanted).all()
            held = wanted.abs() <= torch.finfo(dtype).max  # 1 / eps = 1e6 as a slope is beyond float16
            assert torch.isfinite(value[held]).all()


@every
def test_strided_and_transposed_input(entry):
    module = trained(entry.make(torch.float32))
    inputs = entry.inputs(torch.float32)
    wanted = run(copy.deepcopy(module), inputs)
    layouts = {
        "transposed": [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs],
        "strided": [torch.stack([x, -x], -1)[..., 0] for x in inputs],
        "expanded": [x[:1].expand_as(x) for x in inputs],
    }
    if inputs[0].dim() == 4:
        layouts["channels_last"] = [x.contiguous(memory_format=torch.channels_last) for x in inputs]
    for name, given in layouts.items():
        same = run(copy.deepcopy(module), [x.contiguous() for x in given]) if name == "expanded" else wanted
        for a, b in zip(run(copy.deepcopy(module), given), same, strict=True):
            for value, truth in zip(a, b, strict=True):
                if truth is not None:  # sums in another order
                    torch.testing.assert_close(value, truth, rtol=1e-5, atol=2e-5, msg=f"{entry.name} {name}")


@pytest.mark.parametrize(("shift", "scale"), [(1e4, 1e-3), (1e4, 1.0), (0.0, 1e30), (0.0, 1e-30), (0.0, 1e-4)])
@every
def test_large_means_and_extreme_scales(entry, shift, scale):
    """float32 input of mean 1e4 and spread 1e-3, of size 1e30, of size 1e-30."""
    module = trained(entry.make(torch.float32)).train()
    x, *others = entry.inputs(torch.float32)
    inputs, exact = [x * scale + shift, *others], double(module)
    if shift and "frozen" in entry.name:
        return  # statistics that are given: 1e4 is then no mean but a value, and y of order 1e4 loses nothing else
    ours, truth = results(module(*inputs)), results(exact(*[x.double() for x in inputs]))
    for value, wanted in zip(ours, truth, strict=True):
        assert torch.isfinite(value).all()
        limit = 64 * 2**-23 * wanted.abs().max().clamp_min(1e-30)
        error = (value.double() - wanted).abs().max()
        assert error <= limit, f"off by {error:.3g}"


@every
def test_a_nan_row_stays_its_own_problem(entry):
    module = trained(entry.make(torch.float32)).eval()
    inputs = entry.inputs(torch.float32)
    clean = results(module(*inputs))
    poisoned = inputs[0].clone()
    poisoned.select(entry.batch_dim, 1).fill_(float("nan"))
    for value, wanted in zip(results(module(poisoned, *inputs[1:])), clean, strict=True):
        for row in range(wanted.shape[entry.batch_dim]):
            a, b = value.select(entry.batch_dim, row), wanted.select(entry.batch_dim, row)
            if row != 1:
                assert torch.equal(a, b)
            else:  # an output that x has no part in stays
                assert torch.isnan(a).all() or torch.equal(a, b)
    assert torch.isnan(results(module(poisoned, *inputs[1:]))[0]).any()


@every
def test_compiled_equals_eager(entry):
    module = trained(entry.make(torch.float32))
    inputs = entry.inputs(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    eager = copy.deepcopy(module)
    for _ in range(2):
        for a, b in zip(run(compiled, inputs), run(eager, inputs), strict=True):
            for value, wanted in zip(a, b, strict=True):
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    for (name, value), wanted in zip(compiled.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(value, wanted, msg=name)


@pytest.mark.slow
@every
def test_compiled_by_inductor_equals_eager(entry):
    module = trained(entry.make(torch.float32))
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True)
    for a, b in zip(run(compiled, entry.inputs(torch.float32)), run(module, entry.inputs(torch.float32)), strict=True):
        for value, wanted in zip(a, b, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)


@every
def test_gradients_first_and_second(entry):
    if not entry.exact_gradient:
        return
    module = trained(entry.make(torch.float64))
    names = [name for name, _ in module.named_parameters()]
    inputs = [x.narrow(0, 0, 2).requires_grad_() for x in entry.inputs()]
    parameters = [p.detach().clone().requires_grad_() for p in module.parameters()]

    def function(*given):
        tensors = dict(zip(names, given[len(inputs) :], strict=True))
        return tuple(results(torch.func.functional_call(copy.deepcopy(module), tensors, given[: len(inputs)])))

    torch.autograd.gradcheck(function, (*inputs, *parameters), fast_mode=True)
    torch.autograd.gradgradcheck(function, (*inputs, *parameters), fast_mode=True)


@every
def test_wrong_input_raises(entry):
    module = entry.make(torch.float32)
    inputs = entry.inputs(torch.float32)
    with pytest.raises(TypeError, match=r"int64|floating"):
        module(inputs[0].long(), *inputs[1:])
    if not entry.has_parameters or "weightless" in entry.name:
        return  # any width is right
    with pytest.raises((ValueError, TypeError)) as raised:
        module(*[torch.cat([x] * 3, dim=d) if (d := wide_dim(entry, x)) is not None else x for x in inputs])
    assert any(c.isdigit() for c in str(raised.value)), "the message names the sizes"


def wide_dim(entry, x):
    """The dim that holds the features of the catalog's default width."""
    return next((d for d in range(1, x.dim()) if x.shape[d] == 12), x.dim() - 1)


@every
def test_copies_pickles_and_state_dicts(entry, tmp_path):
    module = trained(entry.make(torch.float32)).eval()
    inputs = entry.inputs(torch.float32)
    wanted = results(module(*inputs))
    torch.save(module, tmp_path / "module.pt")
    loaded = entry.make(torch.float32).eval()
    loaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), torch.load(tmp_path / "module.pt", weights_only=False), loaded):
        assert all(torch.equal(a, b) for a, b in zip(results(other(*inputs)), wanted, strict=True))
        assert repr(other) == repr(module)
