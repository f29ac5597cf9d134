"""Norms at the end of blocks, of stacks of blocks, and of pyramids on such stacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit import audit
from tests.audit.test_place_general import D, Pre, Projected, mlp, places
from tests.audit.test_place_wild import SelfAttention


class Conformer(nn.Module):
    """Unlike pre-norm sublayers, and a norm on the stream behind the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixing, self.second = Pre(), Pre(SelfAttention()), Pre()
        self.end = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.second(self.mixing(self.first(x))))


def test_a_norm_that_ends_each_block_of_several_sublayers_is_post() -> None:
    """That each sublayer is a module of its own makes no stack of the block."""
    result = audit(nn.Sequential(Conformer(), Conformer(), Conformer(), nn.Linear(D, 3)).eval(), torch.randn(2, 5, D))
    assert {n.placement for n in result.norms if n.name.endswith("end")} == {"post"}
    assert "missing-final-norm" not in [f.rule for f in result.findings]


def test_a_norm_that_ends_a_stack_of_like_blocks_is_final() -> None:
    stacks = [nn.Sequential(Pre(), Pre(), Pre(), nn.LayerNorm(D)) for _ in range(2)]
    found = places(nn.Sequential(*stacks, nn.Linear(D, 3)), torch.randn(2, 5, D))
    assert found["0.3"] == found["1.3"] == "final"


class Post(nn.Module):
    """A post-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.norm = mlp(), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.branch(x))


class Decoder(nn.Module):
    """Post-norm blocks, and a norm of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Post(), Post()]), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def test_a_norm_of_the_last_post_norm_is_final_be_there_a_residual_head_behind() -> None:
    found = places(nn.Sequential(nn.Linear(D, D), Decoder(), Pre(), nn.Linear(D, 3)), torch.randn(2, 5, D))
    assert found == {"1.blocks.0.norm": "post", "1.blocks.1.norm": "post", "1.norm": "final", "2.norm": "pre"}


class Hiera(nn.Module):
    """Stages that open with a projected block, on one stream, and a pyramid on their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(Pre(), Pre()), *(nn.Sequential(Projected(), Pre()) for _ in "12")])
        self.laterals = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        ends = []
        for stage in self.stages:
            x = stage(x)
            ends.append(x)
        total = self.laterals[2](ends[2])
        outputs = [total]
        for end, lateral in zip(ends[1::-1], self.laterals[1::-1], strict=True):
            total = F.interpolate(total, scale_factor=1.0) + lateral(end)
            outputs.append(total)
        return outputs


def test_a_pyramid_hides_no_projected_block() -> None:
    """What joins two levels goes around the blocks between them and is none itself."""
    result = audit(Hiera().eval(), torch.randn(2, 5, D))
    branches = [(b.placement, b.slots) for b in result.branches]
    assert branches == [("pre", {"input": [f"stages.{s}.{n}.norm"]}) for s in range(3) for n in range(2)]


class Rotated(nn.Module):
    """Attention whose normalized queries and keys are turned by a matrix for each pair of features."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * torch.arange(1, D // 2 + 1)
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
        q, k = ((t.unflatten(-1, (-1, 1, 2)) * turn).sum(-1).flatten(-2) for t in self._normed(x))
        return self.out(F.scaled_dot_product_attention(q, k, self.v(x)))

    def _normed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(self.q(x)), self.k_norm(self.k(x))


def test_a_rotation_written_as_a_sum_of_products_leaves_queries_queries() -> None:
    found = places(nn.Sequential(Pre(Rotated()), Pre(), nn.LayerNorm(D)), torch.randn(2, 5, D))
    assert found["0.branch.q_norm"] == found["0.branch.k_norm"] == "qk"
