"""The short ways to the kernels give what the long way gives, and ordinary calls take them."""

import pytest
import torch
from torch import Tensor

from normkit import functional as F
from normkit import nn, ops
from normkit.functional import evaluate, short

needs_kernels = pytest.mark.skipif(not ops.LOADED, reason="there are no kernels to be short about")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
C = 24


def made(*shape: int, dtype: torch.dtype, seed: int, grad: bool = True) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * 1.7 + 0.3).to(dtype).requires_grad_(grad)


def image(dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
    x = made(3, C, 5, 7, dtype=dtype, seed=1, grad=False)
    return x.contiguous(memory_format=layout).requires_grad_()


def running(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.linspace(-1, 1, C, dtype=wide), torch.linspace(0.5, 2, C, dtype=wide)


def wider(z: Tensor) -> Tensor:
    """A stream as wide as it comes: float32 beside a half-precision branch."""
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


ROWS = {
    "layer_norm": lambda x, z, w, b: F.layer_norm(x, (C,), w, b),
    "layer_norm, no bias, 1 + w": lambda x, z, w, b: F.layer_norm(x, (C,), w, None, weight_offset=1.0),
    "rms_norm": lambda x, z, w, b: F.rms_norm(x, (C,), w, 1e-6),
    "rms_norm, own eps": lambda x, z, w, b: F.rms_norm(x, (C,), w),
    "rms_norm, bias": lambda x, z, w, b: F.rms_norm(x, (C,), w, 1e-6, bias=b),
    "rms_norm, before the gain": lambda x, z, w, b: F.rms_norm(x, (C,), w, 1e-6, rounding="before_gain"),
    "add_rms_norm": lambda x, z, w, b: F.rms_norm(x, (C,), w, 1e-6, residual=z),
    "add_rms_norm, Llama": lambda x, z, w, b: F.rms_norm(x, (C,), w, 1e-6, residual=z, rounding="before_gain"),
    "add_rms_norm, wide stream": lambda x, z, w, b: F.rms_norm(x, (C,), w, 1e-6, residual=wider(z)),
    "add_layer_norm": lambda x, z, w, b: F.layer_norm(x, (C,), w, b, residual=z),
    "gated_rms_norm": lambda x, z, w, b: F.rms_norm(x, (C,), w, 1e-6, gate=z),
    "gated_rms_norm, before": lambda x, z, w, b: F.rms_norm(x, (C,), w, 1e-6, gate=z, gate_kind=("sigmoid", "before")),
}
IMAGES = {
    "group_norm": lambda x, w, b, s: F.group_norm(x, 4, w, b),
    "group_norm, plain": lambda x, w, b, s: F.group_norm(x, 4),
    "instance_norm": lambda x, w, b, s: F.instance_norm(x, None, None, w, b),
    "batch_norm": lambda x, w, b, s: F.batch_norm(x, *s, w, b),
    "batch_norm, training": lambda x, w, b, s: F.batch_norm(x, *s, w, b, True, 0.3),
    "batch_norm, training, none kept": lambda x, w, b, s: F.batch_norm(x, None, None, w, b, True),
    "channel_layer_norm": lambda x, w, b, s: F.layer_norm(x, (C,), w, b, channel_dim=1),
}


def results(call, tensors: list[Tensor]) -> list[Tensor]:
    out = call()
    outputs = list(out) if isinstance(out, tuple) else [out]
    used = [t for t in tensors if t.requires_grad]
    total = sum((y.double() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs)
    grads = torch.autograd.grad(total, used, allow_unused=True)
    return [*outputs, *(torch.zeros(0) if g is None else g for g in grads)]


def both_ways(call, tensors: list[Tensor], monkeypatch) -> tuple[list[Tensor], list[Tensor]]:
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "kernels_take", _not_here)  # what every long way asks first
        quick = results(call, tensors)
    with monkeypatch.context() as patch:
        patch.setattr(short, "_LOADED", False)
        slow = results(call, tensors)
    return quick, slow


def _not_here(*_, **__):
    raise AssertionError("an ordinary call went the long way")


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, dtype, monkeypatch):
    x, z = (made(2, 3, C, dtype=dtype, seed=seed) for seed in (1, 2))
    w, b = (made(C, dtype=dtype, seed=seed) for seed in (3, 4))
    quick, slow = both_ways(lambda: ROWS[name](x, z, w, b), [x, z, w, b], monkeypatch)
    assert all(torch.equal(q, s) and q.dtype == s.dtype for q, s in zip(quick, slow, strict=True))


@needs_kernels
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IMAGES)
def test_images(name, dtype, layout, monkeypatch):
    x = image(dtype, layout)
    w, b = (made(C, dtype=dtype, seed=seed) for seed in (3, 4))
    stats = [running(dtype), running(dtype)]
    turns = iter(stats)
    quick, slow = both_ways(lambda: IMAGES[name](x, w, b, next(turns)), [x, w, b], monkeypatch)
    assert all(torch.equal(q, s) and q.stride() == s.stride() for q, s in zip(quick, slow, strict=True))
    for one, other in zip(*stats, strict=True):
        assert torch.equal(one, other) and one._version == other._version
    moved = not torch.equal(stats[0][0], running(dtype)[0])
    assert moved == (name == "batch_norm, training")


@needs_kernels
@pytest.mark.parametrize("training", [True, False])
def test_modules(training, monkeypatch):
    x = image(torch.bfloat16, torch.contiguous_format)
    modules = [nn.BatchNorm2d(C, momentum=0.3).train(training) for _ in range(2)]
    quick = modules[0](x)
    monkeypatch.setattr(short, "_LOADED", False)
    slow = modules[1](x)
    assert torch.equal(quick, slow)
    for (name, one), other in zip(modules[0].state_dict().items(), modules[1].state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert int(modules[0].num_batches_tracked) == int(training)


@needs_kernels
def test_what_is_not_ordinary_goes_the_long_way():
    x, w = made(4, C, dtype=torch.float32, seed=1, grad=False), torch.ones(C)
    assert short.row(False, x, w, None, 1e-6, 0.0, "after_gain") is not None
    meta, odd = torch.empty(4, C, device="meta"), torch.ones(C + 1)
    for refused in (
        short.row(False, meta, w, None, 1e-6, 0.0, "after_gain"),
        short.row(False, x, w.to("meta"), None, 1e-6, 0.0, "after_gain"),
        short.row(True, x, w, w.to("meta"), 1e-6, 0.0, "after_gain"),
        short.row(False, x, odd, None, 1e-6, 0.0, "after_gain"),
        short.row(False, x, w, None, float("inf"), 0.0, "after_gain"),
        short.row(False, x, w, None, 0.0, 0.0, "after_gain"),
        short.row(False, x, w, None, 1e-6, 0.5, "after_gain"),
        short.row(False, x, w, w, 1e-6, 0.0, "before_gain"),
        short.row(False, x.int(), w, None, 1e-6, 0.0, "after_gain"),
        short.add_row(False, x, x.double(), w, None, 1e-6, 0.0, "after_gain"),
        short.add_row(False, x, x[:2], w, None, 1e-6, 0.0, "after_gain"),
        short.gated_row(x, x.half(), w, 1e-6, 0.0, "after_gain", ("silu", "after")),
        short.gated_row(x, x, w, 1e-6, 0.0, "after_gain", ("tanh", "after")),  # type: ignore[arg-type]
        short.group(x, None, None, 5, 1e-5),
        short.instance(x, None, None, 1e-5),
        short.batch_train(x[:1], None, None, None, None, 0.1, 1e-5),
        short.batch_train(x, w, w.clone(), None, None, None, 1e-5),
        short.batch_train(x, odd, odd.clone(), None, None, 0.1, 1e-5),
        short.batch(x, w.clone().requires_grad_(), w, None, None, 1e-5),
    ):
        assert refused is None
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert short.group(x, None, None, 4, 1e-5) is None
