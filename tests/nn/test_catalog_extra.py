"""The corners that every norm of the catalog must survive: dtypes, shapes, transforms, copies."""

import copy
import io
import pickle

import pytest
import torch
from torch.func import functional_call, jacrev, jvp, vmap
from transcribe import flat, gradients, randn, trained

from normkit import nn as normkit_nn
from normkit.nn.catalog_entry import Entry
from normkit.nn.catalog_extra import EXTRA

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, torch.float64)
BY_NAME = {entry.name: entry for entry in EXTRA}
every = pytest.mark.parametrize("name", BY_NAME)
modes = pytest.mark.parametrize(("name", "training"), [(e.name, t) for e in EXTRA for t in {False, e.stateful}])
images = pytest.mark.parametrize("name", [entry.name for entry in EXTRA if len(entry.shapes[0]) == 4])


def ready(entry: Entry, dtype: torch.dtype = torch.float64, *, training: bool = False):
    """The norm with trained-like parameters; in evaluation its statistics are a batch's, not 0 and 1."""
    module = trained(entry.make(dtype), spread=0.2)
    if entry.stateful:
        module(*entry.inputs(dtype, seed=7))
    return module.train(training)


def convert(module, dtype):
    """A copy with parameters and buffers of another dtype."""
    return copy.deepcopy(module).to(dtype)


def test_every_module_of_these_files_is_in_the_catalog():
    here = {type(entry.build()).__name__ for entry in EXTRA}
    elsewhere = {"LayerNorm", "RMSNorm", "Norm"}
    public = {n for n in normkit_nn.__all__ if isinstance(getattr(normkit_nn, n), type)} - {"Ramp"} - elsewhere
    mine = {n for n in public if getattr(normkit_nn, n).__module__.rsplit(".", 1)[-1] in FILES}
    assert mine == here


STEEP = {"scale_norm", "l2_norm", "l2_norm_gain"}  # at zero their derivative is 1/eps, beyond float16
FILES = {"adaptive", "gated", "lengths", "pointwise", "power", "qk", "recurrent", "renorm", "response"}


@every
def test_copies_give_the_same_bits(name):
    entry = BY_NAME[name]
    module, inputs = ready(entry), entry.inputs()
    expected = flat(module(*inputs))
    loaded = entry.make()
    loaded.load_state_dict(module.state_dict(), strict=True)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded.eval(), saved):
        assert twin.training == module.training
        for a, b in zip(flat(twin(*inputs)), expected, strict=True):
            assert torch.equal(a, b)


@every
def test_first_and_second_derivatives(name):
    """Numerically, in float64, for the inputs and every parameter (in evaluation where training keeps state)."""
    entry = BY_NAME[name]
    module = ready(entry)
    names = [n for n, _ in module.named_parameters()]
    small = [t.narrow(entry.batch_dim, 0, 2) for t in entry.inputs()]
    count = len(small)

    def call(*values):
        return tuple(flat(functional_call(module, dict(zip(names, values[count:], strict=True)), values[:count])))

    values = [t.detach().clone().requires_grad_() for t in (*small, *module.parameters())]
    assert torch.autograd.gradcheck(call, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, values, fast_mode=True)


@every
def test_transforms(name):
    """vmap is a loop; jacrev and jvp are what autograd says."""
    entry = BY_NAME[name]
    module, inputs = ready(entry), entry.inputs()
    stacked = [torch.stack([t, t.flip(0) * 2]) for t in inputs]
    looped = [flat(module(*(t[i] for t in stacked))) for i in range(2)]
    for a, *b in zip(vmap(lambda *x: tuple(flat(module(*x))))(*stacked), *looped, strict=True):
        torch.testing.assert_close(a, torch.stack(b))
    x, *rest = inputs
    weights = [randn(*t.shape, seed=9 + i) for i, t in enumerate(flat(module(*inputs)))]

    def scalar(x):
        return sum((t * w).sum() for t, w in zip(flat(module(x, *rest)), weights, strict=True))

    gradient = torch.autograd.functional.jacobian(scalar, x)
    torch.testing.assert_close(jacrev(scalar)(x), gradient)
    direction = randn(*x.shape, seed=5)
    torch.testing.assert_close(jvp(scalar, (x,), (direction,))[1], (gradient * direction).sum())


@every
def test_compiled_equals_eager(name):
    entry = BY_NAME[name]
    module = ready(entry, torch.float32)
    inputs = [t.requires_grad_() for t in entry.inputs(torch.float32)]
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    wanted = [*inputs, *module.parameters()]
    got, expected = compiled(*inputs), module(*inputs)
    for a, b in zip(flat(got), flat(expected), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(gradients(got, wanted), gradients(expected, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every
def test_exported(name):
    entry = BY_NAME[name]
    module, inputs = ready(entry), entry.inputs()
    exported = torch.export.export(module, inputs).module()
    for a, b in zip(flat(exported(*inputs)), flat(module(*inputs)), strict=True):
        torch.testing.assert_close(a, b)


@modes
def test_every_pair_of_dtypes(name, training):
    """The output has the declared dtype, and is the float64 result but for one rounding of a half-precision input."""
    entry = BY_NAME[name]
    start = ready(entry, training=training)
    for dtype in DTYPES:
        for parameters in DTYPES if entry.has_parameters else (torch.float32,):
            module = convert(start, parameters)
            exact = convert(module, torch.float64)
            inputs = entry.inputs(dtype)
            got = flat(module(*inputs))
            assert {t.dtype for t in got} == {dtype}, parameters
            close = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-10}
            recurrent = "gru" in name or "lstm" in name  # rounds its state and its products at every step
            coarsest = max(close[dtype], close[parameters] if recurrent or name == "gated_before" else 0.0)
            if dtype == torch.float64:
                coarsest = max(coarsest, 1e-10)
            for a, b in zip(got, flat(exact(*(t.double() for t in inputs))), strict=True):
                torch.testing.assert_close(a.double(), b, rtol=coarsest, atol=coarsest)


@every
def test_float16_of_magnitude_300(name):
    """Squares overflow float16 here, and their sums the more."""
    entry = BY_NAME[name]
    start = ready(entry)
    inputs = tuple((t * 300).half() for t in entry.inputs())
    if "seed" in name:  # tanh(x . beta) is saturated either way
        assert all(t.isfinite().all() for t in flat(convert(start, torch.float32)(*inputs)))
    got = flat(convert(start, torch.float32)(*inputs))
    expected = flat(start(*(t.double() for t in inputs)))
    for a, b in zip(got, expected, strict=True):
        if a.dtype == torch.float16:
            b = b.clamp(-65504, 65504)
            a = a.double().clamp(-65504, 65504)
        torch.testing.assert_close(a.double(), b, rtol=4e-3, atol=4e-3)


@modes
def test_zeros_give_finite_values_and_gradients(name, training):
    entry = BY_NAME[name]
    for dtype in DTYPES:
        module = ready(entry, torch.float32, training=training)
        inputs = [torch.zeros_like(t).requires_grad_() for t in entry.inputs(dtype)]
        outputs = flat(module(*inputs))
        found = gradients(outputs, [*inputs, *module.parameters()])
        assert all(t.isfinite().all() for t in outputs), dtype
        steep = dtype == torch.float16 and name in STEEP
        assert all(not t.isnan().any() if steep else t.isfinite().all() for t in found), dtype


@every
def test_nan_stays_in_its_own_sample(name):
    entry = BY_NAME[name]
    module, inputs = ready(entry, torch.float32), entry.inputs(torch.float32)
    clean = flat(module(*inputs))
    x = inputs[0].clone()
    x.select(entry.batch_dim, 1).fill_(torch.nan)
    dirty = flat(module(x, *inputs[1:]))
    for a, b in zip(clean, dirty, strict=True):
        dim = 1 if entry.batch_dim == 1 or (("gru" in name or "lstm" in name) and a.dim() == 3) else 0
        for i in (0, 2, 3):
            assert torch.equal(a.select(dim, i), b.select(dim, i))


@every
def test_one_sample_alone_and_in_the_batch(name):
    entry = BY_NAME[name]
    module, inputs = ready(entry), entry.inputs()
    whole = flat(module(*inputs))
    alone = flat(module(*(t.narrow(entry.batch_dim, 2, 1) for t in inputs)))
    for a, b in zip(whole, alone, strict=True):
        dim = 1 if entry.batch_dim == 1 else 0
        torch.testing.assert_close(a.narrow(dim, 2, 1), b)


WIDTHS = {
    "dynamic_tanh": normkit_nn.DynamicTanh,
    "derf": normkit_nn.Derf,
    "layer_scale": normkit_nn.LayerScale,
    "scale_norm": normkit_nn.ScaleNorm,
    "l2_norm": normkit_nn.L2Norm,
    "seed_norm": normkit_nn.SeeDNorm,
    "gated": normkit_nn.GatedRMSNorm,
    "qk": normkit_nn.QKNorm,
    "ada": lambda width, **f: normkit_nn.AdaLayerNorm(width, width, **f),
    "global": normkit_nn.GlobalResponseNorm,
    "power": lambda width, **f: normkit_nn.PowerNorm(width, channel_dim=-1, **f),
    "renorm": lambda width, **f: normkit_nn.BatchRenorm(width, channel_dim=-1, **f),
    "ghost": lambda width, **f: normkit_nn.GhostBatchNorm(width, 2, channel_dim=-1, **f),
    "gru": lambda width, **f: normkit_nn.LayerNormGRU(width, width, **f),
}


@pytest.mark.parametrize("width", [1, 2, 31, 257])
@pytest.mark.parametrize("name", WIDTHS)
def test_any_width_from_one_on(name, width):
    exact = trained(WIDTHS[name](width, dtype=torch.float64))
    single = WIDTHS[name](width)
    single.load_state_dict(exact.state_dict())
    x = randn(3, 4, width)
    both = name in ("qk", "gated", "ada")
    for a, b in zip(flat(single(*[x.float()] * (1 + both))), flat(exact(*[x] * (1 + both))), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    for a in flat(single(*[x.half()] * (1 + both))):
        assert a.isfinite().all()


@every
def test_strided_inputs_and_empty_batches(name):
    entry = BY_NAME[name]
    module, inputs = ready(entry), entry.inputs()
    expected = flat(module(*inputs))
    every_other = [torch.stack([t, t + 1], -1)[..., 0] for t in inputs]
    transposed = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in inputs]
    for layout in (every_other, transposed):
        assert not layout[0].is_contiguous()
        for a, b in zip(flat(module(*layout)), expected, strict=True):
            torch.testing.assert_close(a, b)
    empty = [t.narrow(entry.batch_dim, 0, 0).requires_grad_() for t in inputs]
    outputs = flat(module(*empty))
    assert all(t.numel() == 0 for t in outputs)
    assert all(t.isfinite().all() for t in gradients(outputs, [*empty, *module.parameters()]))


@images
def test_channels_last_memory_gives_the_same_values(name):
    entry = BY_NAME[name]
    module, inputs = ready(entry, torch.float32), entry.inputs(torch.float32)
    moved = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in inputs]
    for a, b in zip(flat(module(*inputs)), flat(module(*moved)), strict=True):
        torch.testing.assert_close(a, b)


@every
def test_integers_are_refused(name):
    entry = BY_NAME[name]
    inputs = entry.inputs(torch.float32)
    with pytest.raises(TypeError, match="floating point"):
        entry.make(torch.float32).eval()(inputs[0].long(), *inputs[1:])


@every
def test_built_on_meta_and_printed(name):
    entry = BY_NAME[name]
    module = entry.make(torch.bfloat16, device="meta") if entry.has_parameters else entry.make()
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    assert type(module).__name__ in repr(module)
    if entry.has_parameters:
        module.to_empty(device="cpu")
        module.reset_parameters()
        fresh = entry.make(torch.bfloat16)
        random = "gru" in name or "lstm" in name
        for (key, a), b in zip(module.state_dict().items(), fresh.state_dict().values(), strict=True):
            assert torch.equal(a, b) or (random and key.split(".")[-1].startswith("weight")), key


@every
def test_under_autocast(name):
    entry = BY_NAME[name]
    module, inputs = ready(entry, torch.float32), entry.inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = flat(module(*inputs))
    for a, b in zip(got, flat(module(*inputs)), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)
