"""Placement on models small enough to read: each wiring of the table, and the dataflows that look like another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit.place import NormCall, NormSite, PlaceResult, module_norm, place
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


# ---- the table ----


def test_pre_norm():
    result = stack(lambda n, f, x: x + f(n[0](x)), 1, embedding=True)
    assert by_slot(result, 0) == {"pre"}
    assert result.placements["final"] == "final"
    assert result.placements["embed_norm"] == "embedding"
    assert wired(result) == ["pre"] * 4
    assert [b.n_input for b in result.branches[:2]] == [("blocks.0.a.0",), ("blocks.0.m.0",)]
    assert [b.name for b in result.branches[:2]] == ["blocks.0.attention", "blocks.0.mlp"]
    assert {b.stream for b in result.branches} == {0}
    assert result.streams["final"] == 0


@pytest.mark.parametrize("embedding", [True, False])
def test_post_norm_and_the_last_of_its_stack(embedding: bool):
    result = stack(lambda n, f, x: n[0](x + f(x)), 1, final=False, embedding=embedding)
    assert by_slot(result, 0) == {"post"}
    assert wired(result) == ["post"] * 4
    assert result.branches[-1].n_stream == ("blocks.1.m.0",)


def test_post_norm_of_a_single_branch():
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.norm, self.embed = Mlp(), nn.LayerNorm(C), nn.Embedding(16, C)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.norm(x + self.f(x))

    assert placed(One()).placements == {"norm": "post"}


def test_a_norm_behind_a_post_norm_stack_is_final():
    result = stack(lambda n, f, x: n[0](x + f(x)), 1, final=True)
    assert result.placements["final"] == "final"
    assert by_slot(result, 0) == {"post"}


def test_sandwich():
    result = stack(lambda n, f, x: x + n[1](f(n[0](x))), 2)
    assert by_slot(result, 0) == {"pre"}
    assert by_slot(result, 1) == {"output"}
    assert wired(result) == ["sandwich"] * 4


def test_output_norm():
    result = stack(lambda n, f, x: x + n[0](f(x)), 1)
    assert by_slot(result, 0) == {"output"}
    assert wired(result) == ["output"] * 4
    assert result.placements["final"] == "final"


def test_deepnorm():
    result = stack(lambda n, f, x: n[0](x * 1.5 + f(x)), 1, final=False)
    assert wired(result) == ["deepnorm"] * 4
    assert {b.alpha for b in result.branches} == {1.5}


def test_an_embedding_scale_is_no_alpha():
    class Scaled(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) * 4.0
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    result = placed(Scaled([Block(lambda n, f, x: n[0](x + f(x)), 1, Attention(), Mlp()) for _ in range(2)], False))
    assert wired(result) == ["post"] * 4


def test_scaled_branch_input():
    result = stack(lambda n, f, x: x + f(n[0](x) * 0.5), 1)
    assert wired(result) == ["scaled"] * 4
    assert result.branches[0].gain == 0.5


def test_sub_and_normformer():
    def blocks(wiring: Callable[..., Tensor], slots: int) -> list[nn.Module]:
        return [Block(wiring, slots, Mlp(nn.LayerNorm(2 * C)), Mlp(nn.LayerNorm(2 * C))) for _ in range(2)]

    sub = placed(Stack(blocks(lambda n, f, x: x + f(n[0](x)), 1)))
    assert sub.placements["blocks.0.mlp.inner"] == "inner"
    assert wired(sub) == ["sub"] * 4
    assert sub.branches[1].n_inner == ("blocks.0.mlp.inner",)
    assert wired(placed(Stack(blocks(lambda n, f, x: x + n[1](f(n[0](x))), 2)))) == ["normformer"] * 4


class Scale(nn.Module):
    def __init__(self, size: int, f: nn.Module) -> None:
        super().__init__()
        self.g, self.f = nn.Parameter(torch.full((size,), 0.1)), f

    def forward(self, x: Tensor) -> Tensor:
        return self.g * self.f(x)


@pytest.mark.parametrize(("size", "name"), [(C, "layerscale"), (1, "rezero")])
def test_learned_branch_scale_without_norms(size: int, name: str):
    blocks: list[nn.Module] = [
        Block(lambda n, f, x: x + f(x), 0, Scale(size, Attention()), Scale(size, Mlp())) for _ in range(2)
    ]
    assert wired(placed(Stack(blocks))) == [name] * 4


def test_constant_branch_scale():
    result = stack(lambda n, f, x: x + 0.25 * f(n[0](x)), 1)
    assert wired(result) == ["pre"] * 4
    assert {b.scale for b in result.branches} == {0.25}


def test_a_schedule_of_post_then_pre():
    post = [Block(lambda n, f, x: n[0](x + f(x)), 1, Attention(), Mlp())]
    pre = [Block(lambda n, f, x: x + f(n[0](x)), 1, Attention(), Mlp())]
    result = placed(Stack([*post, *pre]))
    assert wired(result) == ["post", "post", "pre", "pre"]
    assert result.placements["final"] == "final"


# ---- more than one branch or stream ----


class Parallel(nn.Module):
    def __init__(self, order: str, norms: int) -> None:
        super().__init__()
        self.attention, self.mlp, self.order = Attention(), Mlp(), order
        self.n = nn.ModuleList(nn.LayerNorm(C) for _ in range(norms))

    def forward(self, x: Tensor) -> Tensor:
        a, m = self.attention(self.n[0](x)), self.mlp(self.n[-1](x))
        return {"left": lambda: (x + a) + m, "right": lambda: x + (a + m), "last": lambda: (a + m) + x}[self.order]()


@pytest.mark.parametrize("order", ["left", "right", "last"])
@pytest.mark.parametrize("norms", [1, 2])
def test_parallel_blocks(order: str, norms: int):
    result = placed(Stack([Parallel(order, norms), Parallel(order, norms)]))
    assert {p for n, p in result.placements.items() if n != "final"} == {"pre"}
    assert result.placements["final"] == "final"
    assert set(wired(result)) == {"pre"}


def test_residual_with_a_second_stream():
    """ResiDual: the post-norm stream is what branches read; the second only sums, and is normalized once."""

    class ResiDual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.f = nn.Embedding(16, C), nn.ModuleList(Mlp() for _ in range(3))
            self.post, self.last = nn.ModuleList(nn.LayerNorm(C) for _ in range(3)), nn.LayerNorm(C)

        def forward(self, ids: Tensor) -> Tensor:
            x = dual = self.embed(ids)
            for f, norm in zip(self.f, self.post, strict=True):
                y = f(x)
                x, dual = norm(x + y), dual + y
            return x + self.last(dual)

    result = placed(ResiDual())
    assert result.placements == {"post.0": "post", "post.1": "post", "post.2": "post", "last": "final"}
    assert len(result.branches) == 6  # the sum of the two streams at the end is no branch


def test_encoder_decoder():
    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross, self.norm = Cross(), nn.LayerNorm(C)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return x + self.cross(self.norm(x), memory)

    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pre = lambda n, f, x: x + f(n[0](x))  # noqa: E731
            self.encoder = Stack([Block(pre, 1, Attention(), Mlp()) for _ in range(2)])
            self.encoder.head = nn.Identity()  # type: ignore[assignment]
            self.embed, self.cross = nn.Embedding(16, C), nn.ModuleList(Decode() for _ in range(2))
            self.final = nn.LayerNorm(C)

        def forward(self, ids: Tensor) -> Tensor:
            memory = self.encoder(ids)
            x = self.embed(ids)
            for cross in self.cross:
                x = cross(x, memory)
            return self.final(x)

    result = placed(Seq2Seq())
    assert result.placements["encoder.final"] == "final"
    assert result.placements["final"] == "final"
    assert result.placements["cross.0.norm"] == result.placements["cross.1.norm"] == "pre"
    assert [b.stream for b in result.branches] == [0, 0, 0, 0, 1, 1]


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(memory).transpose(-1, -2), -1) @ self.v(memory)


@pytest.mark.parametrize("depth", [1, 2])
def test_constant_queries_start_a_stream(depth: int):
    """Object queries: zeros plus learned positions; the stream is the zeros, the positions are added to it."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(1, 5, C))
            self.own = nn.ModuleList(Attention() for _ in range(depth))
            self.cross = nn.ModuleList(Cross() for _ in range(depth))
            self.a = nn.ModuleList(nn.LayerNorm(C) for _ in range(depth))
            self.b = nn.ModuleList(nn.LayerNorm(C) for _ in range(depth))

        def forward(self, memory: Tensor) -> Tensor:
            hidden = torch.zeros(1, 5, C)
            for own, a, cross, b in zip(self.own, self.a, self.cross, self.b, strict=True):
                hidden = a(hidden + own(hidden + self.position))
                hidden = b(hidden + cross(hidden + self.position, memory))
            return hidden

    result = placed(Queries(), torch.randn(1, 5, C))
    assert set(result.placements.values()) == {"post"}
    assert wired(result) == ["post"] * (2 * depth)


def test_the_norm_of_a_context_is_a_pre_norm():
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents, self.embed = nn.Parameter(torch.randn(1, 5, C)), nn.Linear(C, C)
            self.norm, self.context, self.cross = nn.LayerNorm(C), nn.LayerNorm(C), Cross()

        def forward(self, x: Tensor) -> Tensor:
            latents = self.latents.expand(len(x), -1, -1)
            return latents + self.cross(self.norm(latents), self.context(self.embed(x)))

    assert placed(Latents(), torch.randn(2, 5, C)).placements == {"norm": "pre", "context": "pre"}


def test_blocks_that_begin_by_normalizing_the_stream():
    """The identity is the normed stream: every block's first norm is a post-norm, and the one behind all is final."""

    class Begin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.m, self.attention, self.mlp = nn.LayerNorm(C), nn.LayerNorm(C), Attention(), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x = self.m(x + self.attention(x))
            return x + self.mlp(x)

    result = placed(Stack([Begin(), Begin()], embedding=True))
    assert {p for n, p in result.placements.items() if n.startswith("blocks")} == {"post"}
    assert (result.placements["embed_norm"], result.placements["final"]) == ("embedding", "final")


@pytest.mark.parametrize("mixed", [False, True])
def test_a_norm_that_only_gates_its_stream_is_not_final(mixed: bool):
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_norm, self.gate, self.norm, self.f = nn.LayerNorm(C), nn.Linear(C, 1), nn.LayerNorm(C), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.f(self.norm(x))
            gate = torch.sigmoid(self.gate(self.gate_norm(y)))
            return x + y * gate if mixed else y * gate

    result = placed(Stack([Gated(), Gated(), Gated()]))
    assert [result.placements[f"blocks.{i}.gate_norm"] for i in range(2)] == ["pre"] * 2
    assert result.placements["final"] == "final"


def test_an_input_that_is_changed_for_one_branch_only():
    """Zamba 2: what a shared layer adds is read by the mixer, and the stream goes on without it."""

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.shared, self.mixer = nn.LayerNorm(C), Mlp(), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mixer(self.norm(x + self.shared(x)))

    result = placed(Stack([Changed(), Changed()]))
    assert result.placements["blocks.0.norm"] == result.placements["blocks.1.norm"] == "pre"


def test_shared_layer_is_placed_by_its_calls():
    block = Block(lambda n, f, x: n[0](x + f(x)), 1, Attention(), Mlp())
    result = placed(Stack([block] * 3, final=False))
    assert by_slot(result, 0) == {"post"}
    assert len(result.calls["blocks.0.a.0"]) == 3


# ---- inside a branch, and what only looks like a stream ----


@pytest.mark.parametrize("rotary", [False, True])
def test_query_and_key_norms(rotary: bool):
    pre = lambda n, f, x: x + f(n[0](x))  # noqa: E731
    result = placed(Stack([Block(pre, 1, Attention(True, rotary), Mlp()) for _ in range(2)]))
    assert {p for n, p in result.placements.items() if n.endswith((".q", ".k"))} == {"qk"}
    assert wired(result) == ["pre"] * 4


@pytest.mark.parametrize("fused", [False, True])
def test_a_value_norm_is_inner(fused: bool):
    class ValueNorm(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.LayerNorm(C)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            if fused:
                return self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], self.v(v)[:, None])[:, 0])
            return self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ self.v(v))

    result = placed(Stack([Block(lambda n, f, x: x + f(n[0](x)), 1, ValueNorm(), Mlp()) for _ in range(2)]))
    assert result.placements["blocks.0.attention.v"] == "inner"


class Mixer(nn.Module):
    """A state-space mixer in outline: a skip of its own around the scan, and norms on what the scan takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.scan, self.out = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.d, self.norm = nn.Parameter(torch.ones(C)), nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.inside(x))
        y = self.scan(self.norm(x)) + self.d * x
        return self.out(y)


def test_a_skip_inside_a_mixer_is_not_the_stream():
    result = placed(Stack([Block(lambda n, f, x: x + f(n[0](x)), 1, Mixer(), Mlp()) for _ in range(2)]))
    assert result.placements["blocks.0.attention.norm"] == "inner"
    assert wired(result) == ["pre"] * 4


def test_a_state_carried_through_chunks_is_not_a_stream():
    class Delta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            state = k[:, :1].transpose(1, 2) @ v[:, :1]
            outputs = []
            for t in range(1, 5):
                outputs.append(q[:, t : t + 1] @ state)
                state = state + k[:, t : t + 1].transpose(1, 2) @ (v[:, t : t + 1] - k[:, t : t + 1] @ state)
            return self.out(torch.cat((outputs[0], *outputs), 1))

    result = placed(Stack([Block(lambda n, f, x: x + f(n[0](x)), 1, Delta(), Mlp()) for _ in range(2)]))
    assert wired(result) == ["pre"] * 4


def test_a_skip_from_the_branch_norm_is_not_the_stream():
    """LAuReL: the normed input plus a low-rank map of it joins the branch."""

    class Laurel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.low, self.high, self.f = nn.LayerNorm(C), nn.Linear(C, 2), nn.Linear(2, C), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            n = self.norm(x)
            return x + self.f(n) + (n + self.high(self.low(n)))

    assert placed(Stack([Laurel(), Laurel()])).placements["blocks.1.norm"] == "pre"


class Wrapped(nn.Module):
    """A long skip around a stack."""

    def __init__(self, down: bool) -> None:
        super().__init__()
        pre = lambda n, f, x: x + f(n[0](x))  # noqa: E731
        self.down = nn.Linear(C, C) if down else nn.Identity()
        self.up = nn.Linear(C, C) if down else nn.Identity()
        self.norm = nn.LayerNorm(C)
        self.blocks = nn.ModuleList(Block(pre, 1, Attention(), Mlp()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        for block in self.blocks:
            y = block(y)
        return x + self.up(self.norm(y))


@pytest.mark.parametrize("down", [False, True])
def test_a_long_skip_does_not_hide_the_blocks_inside(down: bool):
    result = placed(Stack([Wrapped(down)]))
    assert {p for n, p in result.placements.items() if n.startswith("blocks.0.blocks.")} == {"pre"}
    assert wired(result).count("pre") == 4
    assert result.placements["blocks.0.norm"] == "final"
    assert result.placements["final"] == "final"


def test_a_positional_convolution_is_no_block():
    class Positional(Stack):
        def __init__(self) -> None:
            post = [Block(lambda n, f, x: n[0](x + f(x)), 1, Attention(), Mlp()) for _ in range(2)]
            super().__init__(post, final=False, embedding=True)
            self.position = nn.Conv1d(C, C, 3, padding=1)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x = self.embed_norm(x + F.gelu(self.position(x.transpose(1, 2))).transpose(1, 2))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    result = placed(Positional())
    assert result.placements["embed_norm"] == "embedding"
    assert wired(result) == ["post"] * 4


def test_head_norm():
    class Head(Stack):
        def __init__(self) -> None:
            super().__init__([Block(lambda n, f, x: x + f(n[0](x)), 1, Attention(), Mlp()) for _ in range(2)])
            self.dense, self.norm = nn.Linear(C, C), nn.LayerNorm(C)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(F.gelu(self.dense(self.final(x)[:, 0]))))

    result = placed(Head())
    assert (result.placements["final"], result.placements["norm"]) == ("final", "head")


# ---- convolutions ----


class Residual2d(nn.Module):
    def __init__(self, project: bool) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 3, padding=1)
        self.n1, self.n2 = nn.BatchNorm2d(C), nn.BatchNorm2d(C)
        self.shortcut = nn.Sequential(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C)) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.n2(self.c2(F.relu(self.n1(self.c1(x))))))


def test_residual_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, C, 3), nn.BatchNorm2d(C), nn.ReLU(), Residual2d(False), Residual2d(True), Residual2d(False),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(C), nn.Linear(C, 4),
    )  # fmt: skip
    result = placed(model, torch.randn(2, 3, 8, 8))
    assert result.placements.pop("8") == "final"
    assert set(result.placements.values()) == {"conv"}
    assert len(result.branches) == 3


class Unet(nn.Module):
    """Group norm, activation, convolution; with ``project`` the shortcut reads the normed input too."""

    def __init__(self, project: bool) -> None:
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(2, C), nn.GroupNorm(2, C)
        self.c1, self.c2 = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 3, padding=1)
        self.shortcut = nn.Conv2d(C, C, 1) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.n1(x))
        branch = self.c2(F.silu(self.n2(self.c1(y))))
        return branch + (x if self.shortcut is None else self.shortcut(y))


@pytest.mark.parametrize("project", [False, True])
def test_pre_activation_convolutions(project: bool):
    model = nn.Sequential(nn.Conv2d(3, C, 3), Unet(project), Unet(project), Unet(False), nn.GroupNorm(2, C))
    result = placed(model, torch.randn(2, 3, 8, 8))
    assert result.placements.pop("4") == "final"
    assert set(result.placements.values()) == {"conv"}


def test_one_convolution_in_a_stream_of_tokens():
    """DeBERTa: a convolution of the embeddings joins the stream behind the first layer, and a post-norm follows."""

    class Joined(Stack):
        def __init__(self) -> None:
            super().__init__([Block(lambda n, f, x: n[0](x + f(x)), 1, Attention(), Mlp()) for _ in range(2)], False)
            self.conv, self.norm = nn.Conv1d(C, C, 3, padding=1), nn.LayerNorm(C)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            y = self.norm(self.blocks[0](x) + self.conv(x.transpose(1, 2)).transpose(1, 2))
            return self.head(self.blocks[1](y))

    result = placed(Joined())
    assert set(result.placements.values()) == {"post"}


@pytest.mark.parametrize(("kind", "expected"), [("linear", "embedding"), ("conv", "conv")])
def test_a_norm_between_two_stages(kind: str, expected: str):
    class Stages(Stack):
        def __init__(self) -> None:
            super().__init__([Block(lambda n, f, x: x + f(n[0](x)), 1, Attention(), Mlp()) for _ in range(2)])
            self.norm = nn.LayerNorm(2 * C if kind == "linear" else C)
            self.merge = nn.Linear(2 * C, C) if kind == "linear" else nn.Conv1d(C, C, 2, 2)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.blocks[0](self.embed(ids))[:, :4]
            if kind == "linear":
                x = self.merge(self.norm(torch.cat((x[:, ::2], x[:, 1::2]), -1)))
            else:
                x = self.merge(self.norm(x).transpose(1, 2)).transpose(1, 2)
            return self.head(self.final(self.blocks[1](x)))

    result = placed(Stages())
    assert (result.placements["norm"], result.placements["final"]) == (expected, "final")
    assert {b.stream for b in result.branches} == {0, 1}


def test_plain_convolutions():
    model = nn.Sequential(nn.Conv2d(3, C, 3), nn.GroupNorm(2, C), nn.ReLU(), nn.Conv2d(C, C, 3), nn.BatchNorm2d(C))
    assert set(placed(model, torch.randn(2, 3, 8, 8)).placements.values()) == {"conv"}


def test_depthwise_convolution_in_a_branch_of_linear_maps():
    class ConvNeXt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm, self.mlp = nn.Conv2d(C, C, 3, padding=1, groups=C), nn.LayerNorm(C), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(self.mix(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

    model = nn.Sequential(nn.Conv2d(3, C, 2, 2), ConvNeXt(), ConvNeXt())
    assert set(placed(model, torch.randn(2, 3, 8, 8)).placements.values()) == {"inner"}


# ---- how it is written must not matter ----


@pytest.mark.parametrize(
    "add",
    [
        lambda x, y: x.add_(y),
        lambda x, y: torch.add(x, y),
        lambda x, y: torch.addcmul(x, y, torch.ones(C)),
        lambda x, y: x + F.dropout(y.to(torch.float64).to(x.dtype), 0.1, False),
        lambda x, y: torch.cat((x[:, :1], x[:, 1:]), 1) + y.reshape(-1, C).view_as(x),
        lambda x, y: x.index_add_(1, torch.arange(5), y),
        lambda x, y: torch.where(torch.arange(5)[:, None] > 0, x + y, x),
    ],
)
def test_forms_of_the_same_add(add: Callable[[Tensor, Tensor], Tensor]):
    result = stack(lambda n, f, x: add(x, f(n[0](x))), 1)
    assert by_slot(result, 0) == {"pre"}
    assert wired(result) == ["pre"] * 4
    assert {branch.stream for branch in result.branches} == {0}
    assert result.placements["final"] == "final"


def test_highway_gate():
    class Highway(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.f, self.gate = nn.LayerNorm(C), Mlp(), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            g = torch.sigmoid(self.gate(x))
            return x * (1 - g) + self.f(self.norm(x)) * g

    result = placed(Stack([Highway(), Highway()]))
    assert result.placements["blocks.0.norm"] == result.placements["blocks.1.norm"] == "pre"


def test_experts_scattered_in_place():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(C, 2), nn.ModuleList(Mlp() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, C)
            weights, chosen = self.router(flat).softmax(-1).max(-1)
            out = torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                rows = torch.where(chosen == i)[0]
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, None])
            return out.view_as(x)

    result = placed(Stack([Block(lambda n, f, x: x + f(n[0](x)), 1, Attention(), Experts()) for _ in range(2)]))
    assert wired(result) == ["pre"] * 4
    assert result.placements["final"] == "final"


def test_an_inline_norm_is_a_set_of_operators():
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.f = nn.Embedding(16, C), Mlp()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return x + self.f(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    recorded = trace(Inline(), (IDS,))
    names = [node.name for node in recorded.nodes]
    first, last = names.index("aten.pow.Tensor_Scalar"), names.index("aten.mul.Tensor")
    call = NormCall(recorded.nodes[first].inputs, recorded.nodes[last].outputs[0], frozenset(range(first, last + 1)))
    result = place(recorded, [NormSite("inline", (call,))])
    assert result.placements == {"inline": "pre"}
    assert wired(result) == ["pre"]


def test_meta_tensors_give_the_same():
    def build() -> Stack:
        return Stack([Block(lambda n, f, x: x + n[1](f(n[0](x))), 2, Attention(True), Mlp()) for _ in range(2)])

    with torch.device("meta"):
        meta = placed(build(), IDS.to("meta"))
    assert meta.placements == placed(build()).placements
