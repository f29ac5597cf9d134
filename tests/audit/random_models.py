"""Random module trees, many of them broken in some way, for an audit to survive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

WIDTHS = (3, 4, 6)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise random.choice([ValueError("odd"), RuntimeError(""), KeyError(3), AssertionError(), StopIteration()])


class Exits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit(2)


class Poison(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.zeros_like(x)


class WrongShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1]


class Odd(nn.Module):
    """Returns something that is no tensor, or hides one."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return (None, "text", {"a": [x]}, (x, None), iter([x]), object(), lambda: x, {1, 2}, 3.5)[self.kind]


class InPlace(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.weight.data.mul_(1.5)
        self.seen = x
        return x.add_(1.0)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True) + torch.rand(()) * random.random()


class Flips(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.train(not self.training)
        return x if float(x.sum()) > 0 else -x


class Handmade(nn.Module):
    """A norm written as operators: RMS, L2 or by the standard deviation."""

    def __init__(self, width: int, kind: int) -> None:
        super().__init__()
        self.gain, self.kind = nn.Parameter(torch.rand(width)), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == 0:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain
        if self.kind == 1:
            return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = self.again = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.inner(x))


class Catches(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except Exception:
            return x


class Yields(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        def parts() -> Iterator[Tensor]:
            for row in x:
                yield self.inner(row[None])

        return torch.cat(list(parts()))


class Unused(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.spare = inner, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda m, args, out: out)
    module.register_forward_pre_hook(lambda m, args: None)
    return module


def _parametrized(width: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(width, width))


def tree(rng: random.Random, width: int, depth: int) -> nn.Module:
    """A random tree; about one leaf in six is broken."""
    if depth == 0 or rng.random() < 0.15:
        return _leaf(rng, width)
    kind = rng.randrange(8)
    inner = tree(rng, width, depth - 1)
    if kind < 3:
        return nn.Sequential(*(tree(rng, width, depth - 1) for _ in range(rng.randint(1, 3))))
    wrap: Callable[[nn.Module], nn.Module] = (Residual, Twice, Catches, Yields, lambda m: Unused(m, width))[kind - 3]
    made = wrap(inner)
    return _hooked(made) if rng.random() < 0.15 else made


def _leaf(rng: random.Random, width: int) -> nn.Module:
    if rng.random() < 0.17:
        broken = (
            Raises,
            Poison,
            WrongShape,
            lambda: Odd(rng.randrange(9)),
            lambda: InPlace(width),
            Random,
            Flips,
            Exits,
        )
        return rng.choice(broken)()
    sound: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.LayerNorm(width),
        lambda: nn.RMSNorm(width, elementwise_affine=rng.random() < 0.5),
        lambda: nn.Linear(width, width),
        lambda: Handmade(width, rng.randrange(3)),
        lambda: _parametrized(width),
        nn.Identity,
        nn.GELU,
        lambda: nn.Dropout(0.5),
        lambda: nn.LayerNorm(width, dtype=torch.float64),
        lambda: nn.BatchNorm1d(5),
        lambda: nn.GroupNorm(1, 5),
    )
    return rng.choice(sound)()


def case(seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model and what to call it with (sometimes nothing, or something wrong)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width = rng.choice(WIDTHS)
    model = tree(rng, width, rng.randint(1, 3))
    for module in model.modules():
        module.training = rng.random() < 0.5
    x = torch.randn(2, 5, width)
    given = ((), (None,), (x.long(),), (x[..., :2],), (x, x), ([x],))[rng.randrange(6)] if rng.random() < 0.1 else (x,)
    return model, given
