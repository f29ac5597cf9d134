"""Placement of each wiring of the table, and of models with several branches or streams at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.audit.wirings import Attention, Block, C, Cross, Mlp, Stack, by_slot, placed, stack, wired

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
    assert set(wired(result)) == {"parallel"}


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
