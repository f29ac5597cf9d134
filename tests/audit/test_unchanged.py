"""An audited model comes out as it went in, whatever it is made of."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normkit.audit import AuditError, audit

WIDTH = 8


class Inline(nn.Module):
    """An RMSNorm in the block's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Residual(nn.Module):
    """A branch around a child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return x + self.child(x)


class Counting(nn.Module):
    """Rebinds a buffer, writes another in place, and changes a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rebound", torch.zeros(()))
        self.register_buffer("written", torch.zeros(3, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        self.rebound = self.rebound + 1
        self.written.add_(1)  # type: ignore[operator]
        return x


class Random(nn.Module):
    """Takes random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) * random.random()


class Raising(nn.Module):
    """Fails half-way."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("half-way")


class Branching(nn.Module):
    """Control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


class Channels(nn.Module):
    """A norm over channels, between transposes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def tree(choose: random.Random, depth: int, shared: list[nn.Module]) -> nn.Module:
    """A random module from [B, T, WIDTH] to the same."""
    leaves = [
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH),
        lambda: Channels(nn.BatchNorm1d(WIDTH)),
        lambda: Channels(nn.GroupNorm(2, WIDTH)),
        lambda: Channels(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
        lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=bool(choose.getrandbits(1))),
        lambda: nn.Dropout(0.3),
        lambda: nn.GELU(),
        lambda: nn.LazyLinear(WIDTH),
        Inline, Counting, Random, Branching,
    ]  # fmt: skip
    if depth == 0 or choose.random() < 0.2:
        if shared and choose.random() < 0.15:
            return choose.choice(shared)
        if choose.random() < 0.03:
            return Raising()
        made = choose.choice(leaves)()
        shared.append(made)
        return made
    children = [tree(choose, depth - 1, shared) for _ in range(choose.randint(1, 3))]
    container: nn.Module = nn.Sequential(*children)
    return Residual(container) if choose.random() < 0.5 else container


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that must stay as it was, tensors by identity and by bits."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = {k: list(v) for k, v in vars(module).items() if "hooks" in k and isinstance(v, dict)}
        found[f"module {name}"] = (type(module), module.training, hooks, sorted(vars(module)))
        for kind, registry in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in registry.items():
                found[f"{kind} {name}.{key}"] = None if tensor is None else _bits(tensor)
    return found


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    lazy = nn.parameter.is_lazy(tensor)
    grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.clone().tolist())
    values = None if lazy else tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()
    return id(tensor), tensor.dtype, tensor.requires_grad, grad, values


def world() -> tuple[Any, ...]:
    """The process-wide state that a forward may change."""
    return (
        torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled(), torch.get_default_dtype(),
        torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_enabled("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(100))
def test_a_random_model_is_as_before(seed: int) -> None:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    model = tree(choose, 3, [])
    model.train(choose.random() < 0.5)
    for module in model.modules():
        if choose.random() < 0.2:
            module.training = not module.training
    for parameter in model.parameters():
        if not nn.parameter.is_lazy(parameter):
            parameter.requires_grad_(choose.random() < 0.8)
            if parameter.requires_grad and choose.random() < 0.3:
                parameter.grad = torch.ones_like(parameter)
    x = torch.randn(4, 5, WIDTH)
    x.requires_grad_(choose.random() < 0.5)
    hook = model.register_forward_hook(lambda *_: None)
    before, kept, around = state_of(model), x.detach().clone(), world()
    said = ""
    try:
        audit(model, x).to_json()
    except AuditError as error:
        said = str(error)
    assert "\n" not in said
    assert world() == around
    assert torch.equal(x.detach(), kept)
    assert x.grad is None
    assert state_of(model) == before
    hook.remove()


@pytest.mark.parametrize("before", [None, 3.0])
def test_gradients_of_a_model_that_runs_backward_in_its_forward(before: float | None) -> None:
    class Adapting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                self.linear(x).square().sum().backward()
            return self.norm(self.linear(x))

    model = Adapting()
    grad = None if before is None else torch.full((WIDTH, WIDTH), before)
    model.linear.weight.grad = grad
    audit(model, torch.randn(2, WIDTH))
    assert model.linear.weight.grad is grad
    assert before is None or bool((model.linear.weight.grad == before).all())
    assert model.linear.bias.grad is None
