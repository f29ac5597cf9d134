"""One suite of hard cases over the catalog of all norms: a norm is tested by adding its line there."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

from normkit import nn as normkit_nn
from normkit.nn.catalog import CATALOG, catalog

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
every = pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)


def build(entry, dtype=torch.float64, **options):
    """The entry's module, trained-like; the same for the same entry, whatever ran before."""
    torch.manual_seed(0)
    return trained(entry.make(dtype, **options))


def settled(entry, dtype=torch.float64):
    """In evaluation, with the statistics of a batch where the norm keeps some."""
    module = build(entry, dtype)
    if entry.stateful:
        module(*entry.inputs(dtype, seed=7))
    return module.eval()


def narrowed(entry, inputs, start, length):
    """A part of the batch."""
    return [x.narrow(entry.batch_dim if x.dim() > entry.batch_dim else 0, start, length) for x in inputs]


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
    check_against_float64(build(entry, dtype), entry.inputs(dtype), units, entry.name)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every
def test_every_pair_of_dtypes(entry, training):
    start = settled(entry).train(training)
    for dtype in DTYPES if entry.has_parameters else DTYPES[:1]:
        for x_dtype in DTYPES:
            module = copy.deepcopy(start).to(dtype)
            exact = double(module)
            y = results(module(*entry.inputs(x_dtype)))
            wanted = results(exact(*[x.double() for x in entry.inputs(x_dtype)]))
            for value, truth in zip(y, wanted, strict=True):
                assert value.dtype == x_dtype, f"{dtype}: the output has the input's dtype"
                # a few roundings of the input's dtype, and of the parameters' where the norm rounds before its gain
                rounds_first = any(word in entry.name for word in ("frozen", "first", "gated_before", "gru", "lstm"))
                limit = 8 * max(ULP[x_dtype], ULP[dtype] if rounds_first else 0)
                torch.testing.assert_close(value.double(), truth, rtol=limit, atol=limit, msg=f"{dtype} {x_dtype}")


# torch's own sigmoid takes another path for the last few elements of a tensor, and its products of matrices sum in an
# order that follows their size: there one row agrees to a few units, elsewhere to the bit.
THROUGH_TORCH = ("gated", "gru", "lstm", "ada_")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every
def test_one_row_alone_and_among_256_gives_the_same_bits(entry, dtype):
    shapes = []
    for shape in entry.shapes:
        dim = entry.batch_dim if len(shape) > entry.batch_dim else 0
        shapes.append((*shape[:dim], 256, *shape[dim + 1 :]))
    entry = dataclasses.replace(entry, shapes=tuple(shapes))
    module, inputs = settled(entry, dtype), entry.inputs(dtype)
    whole = results(module(*inputs))
    for row in (0, 7, 255):
        for a, b in zip(whole, results(module(*narrowed(entry, inputs, row, 1))), strict=True):
            dim = next((d for d, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m), 0)
            a = a.narrow(dim, row, 1)
            if any(name in entry.name for name in THROUGH_TORCH):
                torch.testing.assert_close(a, b, rtol=4 * ULP[dtype], atol=4 * ULP[dtype])
            else:
                assert torch.equal(a, b)


@pytest.mark.parametrize("width", [1, 2, 7, 13, 15])
@pytest.mark.parametrize("index", range(len(CATALOG)), ids=[entry.name for entry in CATALOG])
def test_widths_of_one_odd_and_prime(index, width):
    entry = catalog(width, 5 if width == 15 else 1)[index]
    inputs, floor = entry.inputs(torch.float32), 1e-30
    if width <= 2:  # the gradient is then a difference of equal terms, of order 1 for inputs of order 1
        inputs, floor = [x + x.sign() for x in inputs], 1.0
    units = 64
    if width <= 2 and ("gru" in entry.name or "lstm" in entry.name):  # two gates that may be all but equal share a
        units = 1024  # statistic, and inputs cannot keep them apart
    check_against_float64(build(entry, torch.float32), inputs, units, f"{entry.name} {width}", floor)
    half = copy.deepcopy(build(entry, torch.float32)).half().eval()
    assert all(torch.isfinite(t).all() for t in results(half(*[x.half() for x in inputs])))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every
def test_an_empty_batch(entry, training):
    module = build(entry, torch.float32).train(training)
    before = copy.deepcopy(module.state_dict())
    inputs = narrowed(entry, entry.inputs(torch.float32), 0, 0)
    y, gradients = run(module, inputs)
    assert y[0].numel() == 0 and y[0].shape[entry.batch_dim] == 0
    assert all(g is None or torch.equal(g, torch.zeros_like(g)) for g in gradients)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"an empty batch changed {name}"


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every
def test_rows_of_zeros(entry, training):
    for dtype in DTYPES:
        module = settled(entry, dtype).train(training)
        inputs = [torch.zeros_like(x) for x in entry.inputs(dtype)]
        for ours, truth in zip(run(module, inputs), run(double(module), [x.double() for x in inputs]), strict=True):
            for value, wanted in zip(ours, truth, strict=True):
                assert torch.isfinite(wanted).all()
                held = wanted.abs() <= torch.finfo(dtype).max  # 1 / eps = 1e6 as a slope is beyond float16
                assert torch.isfinite(value[held]).all(), dtype


@every
def test_float16_of_magnitude_300(entry):
    """Squares overflow float16 here, and their sums the more."""
    start = settled(entry)
    inputs = [(x * 300).half() for x in entry.inputs()]
    got = results(copy.deepcopy(start).float()(*inputs))
    for value, wanted in zip(got, results(start(*[x.double() for x in inputs])), strict=True):
        value, wanted = (t.double().clamp(-65504, 65504) for t in (value, wanted))  # float16's range
        torch.testing.assert_close(value, wanted, rtol=4e-3, atol=4e-3)


@every
def test_strided_and_transposed_input(entry):
    module = build(entry, torch.float32)
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
    module = build(entry, torch.float32).train()
    x, *others = entry.inputs(torch.float32)
    inputs, exact = [x * scale + shift, *others], double(module)
    if shift and "frozen" in entry.name:
        return  # statistics that are given: 1e4 is then no mean but a value, and y of order 1e4 loses nothing else
    for step in ("training", "evaluation"):
        ours, truth = results(module(*inputs)), results(exact(*[x.double() for x in inputs]))
        for value, wanted in zip(ours, truth, strict=True):
            assert torch.isfinite(value).all(), step
            limit = 64 * 2**-23 * wanted.abs().max().clamp_min(1e-30)
            if step == "evaluation" and shift:  # by running statistics the mean is a value, which loses what is small
                limit = limit + 8 * 2**-23 * shift / scale
            error = (value.double() - wanted).abs().max()
            assert error <= limit, f"{step}: off by {error:.3g}"
        state = dict(module.named_buffers())
        if (
            scale == 1e30 and entry.stateful and "running_var" in state
        ):  # torch's buffer: a variance of 1e60 is beyond float32
            assert torch.isinf(state["running_var"]).all()
            return
        assert all(torch.isfinite(value).all() for value in state.values())
        module.eval(), exact.eval()


@every
def test_a_nan_row_stays_its_own_problem(entry):
    module = build(entry, torch.float32).eval()
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
    module = build(entry, torch.float32)
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
    module = build(entry, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True)
    for a, b in zip(run(compiled, entry.inputs(torch.float32)), run(module, entry.inputs(torch.float32)), strict=True):
        for value, wanted in zip(a, b, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)


@every
def test_gradients_first_and_second(entry):
    """Numerically, in training (in evaluation where the gradient in training is not the derivative, by design)."""
    module = build(entry) if entry.exact_gradient else settled(entry)
    names = [name for name, _ in module.named_parameters()]
    size = 1 if "gru" in entry.name or "lstm" in entry.name else 2
    inputs = [x.clone().requires_grad_() for x in narrowed(entry, entry.inputs(), 0, size)]
    parameters = [p.detach().clone().requires_grad_() for p in module.parameters()]

    def function(*given):
        tensors = dict(zip(names, given[len(inputs) :], strict=True))
        return tuple(results(torch.func.functional_call(copy.deepcopy(module), tensors, given[: len(inputs)])))

    torch.autograd.gradcheck(function, (*inputs, *parameters), fast_mode=True)
    torch.autograd.gradgradcheck(function, (*inputs, *parameters), fast_mode=True)


@every
def test_vmap_jacrev_and_jvp(entry):
    """vmap is a loop; jacrev and jvp are what autograd says."""
    module, inputs = settled(entry), entry.inputs()
    stacked = [torch.stack([x, x.flip(0) * 2]) for x in inputs]
    looped = [results(module(*(x[i] for x in stacked))) for i in range(2)]
    for a, *b in zip(torch.func.vmap(lambda *x: tuple(results(module(*x))))(*stacked), *looped, strict=True):
        torch.testing.assert_close(a, torch.stack(b))
    x, *rest = inputs
    weights = [torch.randn_like(y) for y in results(module(*inputs))]

    def scalar(x):
        return sum((y * w).sum() for y, w in zip(results(module(x, *rest)), weights, strict=True))

    gradient = torch.autograd.functional.jacobian(scalar, x)
    torch.testing.assert_close(torch.func.jacrev(scalar)(x), gradient)
    direction = torch.randn_like(x)
    torch.testing.assert_close(torch.func.jvp(scalar, (x,), (direction,))[1], (gradient * direction).sum())


@every
def test_vmap_in_training_with_functional_state(entry):
    """Two models as one: parameters and buffers are stacked, and each buffer moves as it does alone."""
    if not entry.stateful or "power" in entry.name:  # PowerNorm's backward writes a buffer
        return
    alone = [build(entry), build(entry)]
    for i, module in enumerate(alone):
        for p in module.parameters():
            p.data.add_(i)
    parameters, buffers = torch.func.stack_module_state(alone)
    skeleton = copy.deepcopy(alone[0]).to("meta")
    x = torch.stack(entry.inputs() * 2) * torch.tensor([1.0, 3.0]).view(2, *[1] * len(entry.shapes[0]))

    def call(parameters, buffers, x):
        return torch.func.functional_call(skeleton, (parameters, buffers), x)

    y = torch.func.vmap(call)(parameters, buffers, x)
    for i, module in enumerate(alone):
        torch.testing.assert_close(y[i], module(x[i]))
        for name, value in module.named_buffers():
            torch.testing.assert_close(buffers[name][i], value, msg=name)


@every
def test_export_with_a_dynamic_batch(entry):
    module, inputs = settled(entry, torch.float32), entry.inputs(torch.float32)
    batch = torch.export.Dim("batch", min=2)
    dynamic = tuple({entry.batch_dim if x.dim() > entry.batch_dim else 0: batch} for x in inputs)
    program = torch.export.export(module, inputs, dynamic_shapes=dynamic)
    longer = [torch.cat([x, x, x], next(iter(dims))) for x, dims in zip(inputs, dynamic, strict=True)]
    for given in (inputs, longer):
        for a, b in zip(results(program.module()(*given)), results(module(*given)), strict=True):
            torch.testing.assert_close(a, b)


@every
def test_under_autocast(entry):
    """Forward and backward; a norm's float32 input stays float32, a bfloat16 one bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        module, inputs = build(entry, torch.float32), entry.inputs(dtype)
        exact = results(double(module)(*[x.double() for x in inputs]))
        with torch.autocast("cpu", torch.bfloat16):
            y = results(module(*[x.requires_grad_() for x in inputs]))
        for a, b in zip(y, exact, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=3e-2, atol=3e-2)  # linear maps inside run in bfloat16
        if any(t.requires_grad for t in y):
            sum(t.float().sum() for t in y).backward()
            assert all(p.grad is None or (p.grad.dtype == p.dtype) for p in module.parameters())


@every
def test_the_output_can_be_changed_in_place(entry):
    """ReLU(inplace=True) after a norm: nothing that the backward needs is overwritten, and no view forbids it."""
    found = []
    for relu in (torch.relu_, torch.relu):
        module = build(entry)
        inputs = [x.requires_grad_() for x in entry.inputs()]
        y = relu(results(module(*inputs))[0])
        found.append([y.detach(), *torch.autograd.grad(y.sum(), inputs, allow_unused=True)])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@every
def test_an_input_that_changes_before_the_backward_is_noticed(entry):
    """As everywhere in torch: an error, unless the backward needs nothing of it; never the gradient of other values."""
    gradients = []
    for change in (False, True):
        module = build(entry)
        x, *others = entry.inputs()
        moved = x.requires_grad_() * 1
        y = results(module(moved, *others))[0]
        if change:
            with torch.no_grad():
                moved.add_(1)
        try:
            gradients.append(torch.autograd.grad(y.sum(), x)[0])
        except RuntimeError as error:
            if not change or "modified" not in str(error):
                raise
    assert len(gradients) == 1 or torch.equal(*gradients)


@every
def test_inference_mode(entry):
    module, inputs = build(entry, torch.float32), entry.inputs(torch.float32)
    wanted = results(copy.deepcopy(module)(*inputs))
    with torch.inference_mode():
        for a, b in zip(results(module(*inputs)), wanted, strict=True):
            assert torch.equal(a, b)


@every
def test_on_meta(entry):
    """Shapes, strides and dtypes without data; initialised afterwards as if never there."""
    module = entry.make(torch.bfloat16, device="meta") if entry.has_parameters else entry.make()
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    inputs = entry.inputs(torch.bfloat16)
    y = results(module(*[x.to("meta").requires_grad_() for x in inputs]))
    for a, b in zip(y, results(build(entry, torch.bfloat16)(*inputs)), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    if not entry.has_parameters:
        return
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    for (key, a), b in zip(module.state_dict().items(), entry.make(torch.bfloat16).state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@every
def test_wrong_input_raises(entry):
    module = entry.make(torch.float32)
    inputs = entry.inputs(torch.float32)
    with pytest.raises(TypeError, match=r"int64|floating"):
        module(inputs[0].long(), *inputs[1:])
    for bad in (None, "x", [1.0], inputs[0].to(torch.float8_e4m3fn), inputs[0].to(torch.complex64)):
        with pytest.raises(TypeError, match="must be"):
            module(bad, *inputs[1:])
    if not entry.has_parameters or "weightless" in entry.name:
        return  # any width is right
    if list(module.parameters()) or list(module.buffers()):
        with pytest.raises(ValueError, match="meta"):
            module(*[x.to("meta") for x in inputs])
    with pytest.raises((ValueError, TypeError)) as raised:
        module(*[torch.cat([x] * 3, dim=d) if (d := wide_dim(entry, x)) is not None else x for x in inputs])
    assert any(c.isdigit() for c in str(raised.value)), "the message names the sizes"


def wide_dim(entry, x):
    """The dim that holds the features of the catalog's default width."""
    return next((d for d in range(1, x.dim()) if x.shape[d] == 12), x.dim() - 1)


@every
def test_copies_pickles_and_state_dicts(entry, tmp_path):
    """In the middle of training: after a step, with gradients."""
    module, inputs = build(entry, torch.float32), entry.inputs(torch.float32)
    run(module, inputs)
    if list(module.parameters()):
        sum(t.sum() for t in results(module(*inputs))).backward()
    torch.save(module, tmp_path / "module.pt")
    torch.save(module.state_dict(), tmp_path / "state.pt")
    loaded = entry.make(torch.float32)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
    pickled = torch.load(tmp_path / "module.pt", weights_only=False)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), pickled, loaded]
    for training in (True, False):
        wanted = results(module.train(training)(*inputs))
        for other in twins:
            assert all(torch.equal(a, b) for a, b in zip(results(other.train(training)(*inputs)), wanted, strict=True))
            assert repr(other) == repr(module)
            for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
                assert torch.equal(a, b), name
