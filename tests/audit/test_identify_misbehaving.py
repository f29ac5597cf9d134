"""`identify` on modules that misbehave: nothing raises, and nothing is changed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit import identify
from tests.audit.foreign import Fn, rms, tokens

ones = torch.ones


def _raises(m: Any, x: Tensor) -> Tensor:
    raise RuntimeError("no\nwith a second line")


def _changes_global_state(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    random.seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(True)
    return F.layer_norm(x, x.shape[-1:])


def _counts(m: Any, x: Tensor) -> Tensor:
    m.calls.append(1)
    m.n += 1
    return rms(x, 1e-6) * m.w


def _in_place(m: Any, x: Tensor) -> Tensor:
    m.w.mul_(1.5)
    return x.mul_(2)


def _noise(m: Any, x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def _nan(m: Any, x: Tensor) -> Tensor:
    return x / 0 - x / 0


_BAD: list[Callable[..., Any]] = [
    _raises, _changes_global_state, _counts, _in_place, _noise, _nan,
    lambda m, x: None, lambda m, x: (x, x), lambda m, x, y: x + y, lambda m, x: x.sum(), lambda m, x: {"a": x},
    lambda m, x: m.nowhere, lambda m, x: x.to(torch.int64), lambda m, x: [], lambda m, x: x[..., :0],
    lambda m, x: "text",
]  # fmt: skip


def _random_module(seed: int) -> nn.Module:
    rng = random.Random(seed)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8), lambda: nn.BatchNorm1d(6), lambda: nn.GroupNorm(2, 6),
        lambda: nn.InstanceNorm1d(6, track_running_stats=True), lambda: nn.Linear(8, 8), lambda: nn.Dropout(),
        lambda: nn.GELU(),
        lambda: nn.PReLU(), lambda: nn.Softmax(-1), lambda: nn.Sequential(nn.LayerNorm(8), nn.Dropout()),
        lambda: nn.MultiheadAttention(8, 2), lambda: nn.LazyLinear(8), lambda: nn.LazyBatchNorm1d(),
    ]  # fmt: skip
    if rng.random() < 0.5:
        module: nn.Module = Fn(rng.choice(_BAD), w=ones(8))
        module.calls, module.n, module.plain, module.lock = [], 0, torch.zeros(3), threading.Lock()  # type: ignore[assignment]
    else:
        module = rng.choice(kinds)()
    module.train(rng.random() < 0.5)
    for parameter in module.parameters():
        parameter.requires_grad = rng.random() < 0.5
    module.register_forward_hook(lambda *_: pytest.fail("a hook of the original ran"))
    return module.to(torch.bfloat16) if rng.random() < 0.2 else module


def _bits(module: nn.Module) -> list[Any]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = torch.nn.parameter.is_lazy
    return [
        [
            (n, t.dtype, t.requires_grad, t._version, None if lazy(t) else t.detach().clone().tolist())
            for n, t in tensors
        ],
        [m.training for m in module.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
        [(k, v.tolist()) for k, v in vars(module).items() if isinstance(v, Tensor)],
        [(k, str(v)) for k, v in vars(module).items() if isinstance(v, int | list)],
    ]


def _global_state() -> list[Any]:
    return [
        torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.is_autocast_enabled("cpu"),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(100))
def test_nothing_is_changed_and_nothing_raises(seed: int) -> None:
    module, x = _random_module(seed), tokens(4, 6, 8)
    before, state, given = _bits(module), _global_state(), x.clone()
    found = identify(module, x)
    assert _global_state() == state
    assert _bits(module) == before
    assert torch.equal(x, given)
    assert found.reason
    assert found.reason.endswith(".")


@pytest.mark.parametrize("bad", _BAD)
def test_misbehaving_modules_are_no_norm(bad: Callable[..., Any]) -> None:
    module = Fn(bad, w=ones(8))
    module.calls, module.n = [], 0  # type: ignore[assignment]
    assert identify(module, tokens(4, 6, 8)).kind == {_counts: "rms", _changes_global_state: "layer"}.get(bad, "none")
