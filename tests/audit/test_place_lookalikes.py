"""Placement where one dataflow looks like another: skips inside mixers, long skips, convolutions, forms of an add."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit.place import NormCall, NormSite, place
from normkit.audit.trace import trace
from tests.audit.wirings import IDS, Attention, Block, C, Mlp, Stack, by_slot, placed, stack, wired

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
