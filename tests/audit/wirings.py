"""Models small enough to read, and how tests place their norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit.place import PlaceResult, module_norm, place
from normkit.audit.trace import trace

C = 8
Norms = (nn.LayerNorm, nn.BatchNorm2d, nn.GroupNorm)


class Mlp(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.inner = inner or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(F.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(self, qk_norm: bool = False, rotary: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.q = nn.LayerNorm(C) if qk_norm else nn.Identity()
        self.k = nn.LayerNorm(C) if qk_norm else nn.Identity()
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.q(q), self.k(k)
        if self.rotary:
            angle = torch.arange(x.shape[1], device=x.device)[:, None] * torch.ones(C, device=x.device)
            half = C // 2
            q, k = (t * angle.cos() + torch.cat((-t[..., half:], t[..., :half]), -1) * angle.sin() for t in (q, k))
        return self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class Block(nn.Module):
    """A block of two branches, each a function of (norms, branch, x)."""

    def __init__(self, wiring: Callable[..., Tensor], slots: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.wiring = wiring
        self.attention, self.mlp = attention, mlp
        self.a = nn.ModuleList(nn.LayerNorm(C) for _ in range(slots))
        self.m = nn.ModuleList(nn.LayerNorm(C) for _ in range(slots))

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self.m, self.mlp, self.wiring(self.a, self.attention, x))


class Stack(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], final: bool = True, embedding: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, C)
        self.embed_norm = nn.LayerNorm(C) if embedding else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.final = nn.LayerNorm(C) if final else nn.Identity()
        self.head = nn.Linear(C, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_norm(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


IDS = torch.arange(10).reshape(2, 5)


def placed(model: nn.Module, *args: Tensor) -> PlaceResult:
    recorded = trace(model.eval(), args or (IDS,))
    assert recorded.error is None
    return place(recorded, [module_norm(recorded, n) for n, m in model.named_modules() if isinstance(m, Norms)])


def wired(result: PlaceResult) -> list[str]:
    return [branch.placement for branch in result.branches]


def stack(wiring: Callable[..., Tensor], slots: int, final: bool = True, depth: int = 2, **kw: bool) -> PlaceResult:
    return placed(Stack([Block(wiring, slots, Attention(), Mlp()) for _ in range(depth)], final, **kw))


def by_slot(result: PlaceResult, slot: int) -> set[str]:
    return {p for name, p in result.placements.items() if name.startswith("blocks.") and name.endswith(f".{slot}")}


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(memory).transpose(-1, -2), -1) @ self.v(memory)
