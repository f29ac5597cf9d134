"""Each covered case of the functional layer and of the modules really reaches its operator, and only then."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from normkit import functional as F
from normkit import nn, ops
from normkit.functional import evaluate
from normkit.spec import NormSpec

pytestmark = pytest.mark.skipif(not ops.LOADED, reason="the extension is not loaded")

_G = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_G)


W, B, C, W2, B2 = randn(24), randn(24), randn(6), randn(5, 24), randn(5, 24)
ROWS, IMAGE = (3, 5, 24), (4, 6, 5, 7)
MASK = torch.rand(4, 5, 7, generator=_G) > 0.3
MEAN, VAR = randn(6), randn(6).abs() + 0.5


def out_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


ROW_CASES: dict[str, Callable[[torch.Tensor], object]] = {
    "layer_norm": lambda x: F.layer_norm(x, (24,), W, B),
    "layer_norm_int_shape": lambda x: F.layer_norm(x, 24, W, B),
    "layer_norm_two_dims": lambda x: F.layer_norm(x, (5, 24), W2, B2),
    "layer_norm_plain": lambda x: F.layer_norm(x, (24,)),
    "rms_norm": lambda x: F.rms_norm(x, (24,), W, 1e-6),
    "rms_norm_eps_none": lambda x: F.rms_norm(x, (24,), W),
    "rms_norm_bias": lambda x: F.rms_norm(x, (24,), W, 1e-6, bias=B),
    "rms_norm_offset": lambda x: F.rms_norm(x, (24,), W, 1e-6, weight_offset=1.0),
    "rms_norm_before_gain": lambda x: F.rms_norm(x, (24,), W, 1e-6, rounding="before_gain"),
    "rms_norm_groups": lambda x: F.rms_norm(x, (24,), W, 1e-6, groups=4),
    "rms_norm_per_head": lambda x: F.rms_norm(x, (24,), W2, 1e-6),
    "rms_norm_strided": lambda x: F.rms_norm(torch.cat([x, x], -1)[..., :24], (24,), W, 1e-6),
    "rms_norm_residual": lambda x: F.rms_norm(x, (24,), W, 1e-6, residual=x.detach() + 1),
    "layer_norm_residual": lambda x: F.layer_norm(x, (24,), W, B, residual=x.detach() + 1),
    "rms_norm_gate": lambda x: F.rms_norm(x, (24,), W, 1e-6, gate=x.detach() + 1),
    "rms_norm_gate_before": lambda x: F.rms_norm(
        x, (24,), W, 1e-6, gate=x.detach() + 1, gate_kind=("silu", "before"), groups=2
    ),
    "nn.LayerNorm": nn.LayerNorm(24),
    "nn.RMSNorm": nn.RMSNorm(24),
    "nn.RMSNorm_gemma": nn.RMSNorm(24, 1e-6, weight_offset=1.0),
}
CHANNEL_CASES: dict[str, Callable[[torch.Tensor], object]] = {
    "batch_norm_train": lambda x: F.batch_norm(x, MEAN.clone(), VAR.clone(), C, C, training=True),
    "batch_norm_no_running": lambda x: F.batch_norm(x, None, None, C, C, training=True),
    "batch_norm_eval": lambda x: F.batch_norm(x, MEAN, VAR, C, C),
    "batch_norm_masked": lambda x: F.batch_norm(x, MEAN.clone(), VAR.clone(), C, C, training=True, mask=MASK),
    "batch_norm_offset": lambda x: F.batch_norm(x, MEAN, VAR, C, C, weight_offset=1.0),
    "batch_norm_last": lambda x: F.batch_norm(
        x.movedim(1, -1), MEAN.clone(), VAR.clone(), C, C, training=True, channel_dim=-1
    ),
    "group_norm": lambda x: F.group_norm(x, 3, C, C),
    "group_norm_channels_last": lambda x: F.group_norm(x.to(memory_format=torch.channels_last), 3, C, C),
    "group_norm_offset": lambda x: F.group_norm(x, 3, C, C, weight_offset=1.0),
    "instance_norm": lambda x: F.instance_norm(x, None, None, C, C),
    "instance_norm_running": lambda x: F.instance_norm(x, MEAN.clone(), VAR.clone(), C, C),
    "instance_norm_eval": lambda x: F.instance_norm(x, MEAN, VAR, C, C, use_input_stats=False),
    "channel_layer_norm": lambda x: F.layer_norm(x, (6,), C, C, channel_dim=1),
    "channel_layer_norm_channels_last": lambda x: F.layer_norm(
        x.to(memory_format=torch.channels_last), (6,), C, C, channel_dim=1
    ),
    "nn.BatchNorm2d": nn.BatchNorm2d(6),
    "nn.BatchNorm2d_eval": nn.BatchNorm2d(6).eval(),
    "nn.GroupNorm": nn.GroupNorm(2, 6),
    "nn.InstanceNorm2d": nn.InstanceNorm2d(6, track_running_stats=True),
}
OUT_CASES: dict[str, Callable[[torch.Tensor], object]] = {
    "layer_norm": lambda x: F.layer_norm(x, (24,), W, B, out=out_like(x)),
    "rms_norm": lambda x: F.rms_norm(x, (24,), W, 1e-6, out=out_like(x)),
    "rms_norm_gate": lambda x: F.rms_norm(x, (24,), W, 1e-6, gate=x + 1, groups=2, out=out_like(x)),
    "rms_norm_groups": lambda x: F.rms_norm(x, (24,), W, 1e-6, groups=2, out=out_like(x)),
}
CHANNEL_OUT_CASES: dict[str, Callable[[torch.Tensor], object]] = {
    "group_norm": lambda x: F.group_norm(x, 3, C, C, out=out_like(x)),
    "channel_layer_norm": lambda x: F.layer_norm(x, (6,), C, C, channel_dim=1, out=out_like(x)),
}


@pytest.fixture
def reference_calls(monkeypatch: pytest.MonkeyPatch) -> list[NormSpec]:
    """The specs that the reference evaluated, by whichever way it was reached."""
    from normkit import reference

    bind, references = (importlib.import_module(f"normkit.ops.{name}") for name in ("bind", "references"))
    seen: list[NormSpec] = []
    plain, measured = reference.normalize, reference.normalize_measured

    def normalize(x, spec, *args, **options):
        seen.append(spec)
        return plain(x, spec, *args, **options)

    def normalize_measured(x, spec, *args, **options):
        seen.append(spec)
        return measured(x, spec, *args, **options)

    monkeypatch.setattr(evaluate, "normalize_measured", normalize_measured)
    monkeypatch.setattr(references, "normalize", normalize)
    monkeypatch.setattr(bind, "normalize", normalize)
    return seen


def run(call: Callable[[torch.Tensor], object], shape: tuple[int, ...], dtype: torch.dtype, grad: bool) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(grad)
    y = call(x)
    y = y[0] if isinstance(y, tuple) else y
    assert isinstance(y, torch.Tensor)
    assert y.dtype == dtype
    if grad:
        y.float().square().sum().backward()
        assert x.grad is not None
    return y.detach()


BOTH = {**{k: (v, ROWS) for k, v in ROW_CASES.items()}, **{k: (v, IMAGE) for k, v in CHANNEL_CASES.items()}}
OUT = {**{k: (v, ROWS) for k, v in OUT_CASES.items()}, **{k: (v, IMAGE) for k, v in CHANNEL_OUT_CASES.items()}}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_the_kernel_is_taken(name: str, dtype: torch.dtype, grad: bool, reference_calls: list[NormSpec]) -> None:
    call, shape = BOTH[name]
    y = run(call, shape, dtype, grad)
    assert reference_calls == []
    with LookOn():
        expected = run(call, shape, dtype, grad)
    assert reference_calls != []
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OUT)
def test_the_kernel_writes_into_out(
    name: str, reference_calls: list[NormSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    from normkit.functional import core

    monkeypatch.setattr(core, "write", None)  # what copies a result
    call, shape = OUT[name]
    run(call, shape, torch.float32, False)
    assert reference_calls == []


class LookOn(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", BOTH)
def test_a_dispatch_mode_sees_the_arithmetic(name: str) -> None:
    call, shape = BOTH[name]
    with LookOn() as mode:
        run(call, shape, torch.float32, False)
    assert mode.seen
    assert not [s for s in mode.seen if s.startswith("normkit")]


def test_meta_and_fake_tensors_take_the_reference(reference_calls: list[NormSpec]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert nn.LayerNorm(8, device="meta")(torch.empty(2, 8, device="meta")).is_meta
    assert len(reference_calls) == 1
    with FakeTensorMode():
        nn.LayerNorm(8)(torch.empty(2, 8))
    assert len(reference_calls) == 2


WITHOUT = """
import warnings, torch
from normkit import functional as F, nn
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for m, shape in ((nn.LayerNorm(8), (2, 8)), (nn.RMSNorm(8), (2, 8)), (nn.BatchNorm2d(8), (2, 8, 3, 3)),
                     (nn.GroupNorm(2, 8), (2, 8, 3)), (nn.InstanceNorm1d(8), (2, 8, 3))):
        x = torch.randn(shape, requires_grad=True)
        m(x).sum().backward()
told = [str(s.message) for s in seen if "normkit" in str(s.message)]
assert len(told) == 1 and "NORMKIT_NO_NATIVE" in told[0], told
print("fine")
"""


def test_without_the_extension_the_first_norm_says_so_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env={**os.environ, "NORMKIT_NO_NATIVE": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_hard_cases_on_each_instruction_set(level: str) -> None:
    suites = [
        "tests/test_hard_cases.py",
        "tests/test_known_faults.py",
        "tests/ops/test_rows.py",
        "tests/ops/test_channels.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *suites]
    probe = [sys.executable, "-c", "from normkit import ops; print(ops.report().instruction_set)"]
    env = {**os.environ, "NORMKIT_ISA": level}
    got = subprocess.run(probe, env=env, capture_output=True, text=True, check=True).stdout.strip()
    if got != level:
        pytest.skip(f"this processor has {got} at most")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
