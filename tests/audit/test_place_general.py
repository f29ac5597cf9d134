"""Placements that follow from the dataflow where a first look misleads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit import audit

D = 16


def places(model: nn.Module, *inputs: Tensor) -> dict[str, str]:
    return {norm.name: norm.placement for norm in audit(model.eval(), *inputs).norms}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


class Pre(nn.Module):
    """A pre-norm block."""

    def __init__(self, branch: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.branch = norm or nn.LayerNorm(D), branch or mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class Projected(nn.Module):
    """A pre-norm block whose shortcut is a projection of what the branch reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch, self.shortcut = nn.LayerNorm(D), mlp(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.shortcut(x) + self.branch(x)


def test_a_norm_that_a_projection_shortcut_reads_too_opens_its_block() -> None:
    found = places(nn.Sequential(Pre(), Projected(), Pre(), nn.LayerNorm(D)), torch.randn(2, 5, D))
    assert found == {"0.norm": "pre", "1.norm": "pre", "2.norm": "pre", "3": "final"}


class PoolingLess(nn.Module):
    """A token mixer: the neighbourhood's mean minus the token itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False) - x


def test_a_mean_minus_what_it_is_the_mean_of_is_no_residual_add() -> None:
    blocks = [Pre(PoolingLess(), nn.GroupNorm(1, D)) for _ in range(4)]
    mixed = [Pre(nn.Sequential(nn.Conv2d(D, D, 1), nn.GELU()), nn.GroupNorm(1, D)) for _ in range(4)]
    pairs = [block for pair in zip(blocks, mixed, strict=True) for block in pair]
    found = places(nn.Sequential(nn.Conv2d(3, D, 3, 2), *pairs), torch.randn(2, 3, 17, 17))
    assert set(found.values()) == {"pre"}
    assert len(found) == 8


class LinearAttention(nn.Module):
    """Normalized queries meet normalized keys, and the keys make a state besides."""

    def __init__(self, decays: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.decay = nn.Linear(D, D) if decays else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.normalize(self.q(x), dim=-1), F.normalize(self.k(x), dim=-1), self.v(x)
        if self.decay is not None:
            decay = F.logsigmoid(self.decay(x)).cumsum(1)
            q, k = q * decay.exp(), k * (-decay).exp()
        state = k.transpose(1, 2) @ v
        return self.o((q @ k.transpose(1, 2)).tril() @ v + q @ state)


@pytest.mark.parametrize("decays", [False, True])
def test_queries_and_keys_of_a_linear_attention(decays: bool) -> None:
    found = places(nn.Sequential(Pre(LinearAttention(decays)), Pre(), nn.LayerNorm(D)), torch.randn(2, 5, D))
    assert [found[f"0.branch#{i}"] for i in (0, 1)] == ["qk", "qk"]


class Resampler(nn.Module):
    """Attends from latents to a context that its own norm normalizes."""

    def __init__(self) -> None:
        super().__init__()
        self.of_context, self.of_latents = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, context: Tensor, latents: Tensor) -> Tensor:
        context, normed = self.of_context(context), self.of_latents(latents)
        return latents + self.o(F.scaled_dot_product_attention(self.q(normed), self.k(context), self.v(context)))


class Resampling(nn.Module):
    """An encoder without a final norm, read by two resampler blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Pre(), Pre())
        self.blocks = nn.ModuleList(Resampler() for _ in range(2))
        self.norm, self.latents = nn.LayerNorm(D), nn.Parameter(torch.randn(1, 3, D))

    def forward(self, x: Tensor) -> Tensor:
        x, latents = self.encoder(x), self.latents.expand(len(x), -1, -1)
        for block in self.blocks:
            latents = block(x, latents)
        return self.norm(latents)


def test_a_norm_of_the_context_belongs_to_the_branch_that_attends_to_it() -> None:
    found = places(Resampling(), torch.randn(2, 5, D))
    assert {found[f"blocks.{i}.of_context"] for i in (0, 1)} == {"pre"}
    assert found["norm"] == "final"


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_encoder_and_decoder_each_end_in_a_final_norm(norm_first: bool, same: bool) -> None:
    model = nn.Transformer(D, 2, 2, 2, 32, batch_first=True, norm_first=norm_first)
    x = torch.randn(2, 5, D)
    found = places(model, x, x if same else torch.randn(2, 5, D))
    assert (found["encoder.norm"], found["decoder.norm"]) == ("final", "final")
    assert set(found.values()) == {"final", "pre" if norm_first else "post"}


class Downsampling(nn.Module):
    """Attention with fewer queries than keys and no residual, between two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.of_q, self.of_kv, self.of_o = nn.LayerNorm(D), nn.LayerNorm(2 * D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.of_kv(self.kv(x)).chunk(2, -1)
        scores = self.of_q(self.q(x[:, ::2])) @ k.transpose(1, 2)
        return self.of_o(self.o(scores.softmax(-1) @ v))


def test_norms_between_two_stages_are_not_the_head() -> None:
    found = places(nn.Sequential(Pre(), Downsampling(), Pre(), nn.LayerNorm(D)), torch.randn(2, 6, D))
    assert "head" not in found.values()
    assert found["1.of_q"] == "qk"


class Proposals(nn.Module):
    """Tokens are compared with normalized words; what is made of the best ones guides a decoder's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.words = nn.Sequential(Pre(), Pre(), nn.LayerNorm(D)), nn.LayerNorm(D)
        self.text, self.proposal, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.box, self.start, self.decoder = nn.Linear(D, D), nn.Parameter(torch.randn(3, D)), nn.ModuleList(
            [Guided(), Guided()]
        )  # fmt: skip

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        memory, words = self.encoder(x), self.words(self.text(words))
        tokens = self.norm(self.proposal(memory))
        logits = tokens @ words.transpose(1, 2)
        best = logits.amax(-1).topk(3, -1).indices[..., None].expand(-1, -1, D)
        places = self.box(tokens).gather(1, best)
        queries = self.start.expand(x.shape[0], -1, -1)
        for layer in self.decoder:
            queries = layer(queries, places, memory)
        return queries, logits


class Guided(nn.Module):
    """Post-norm attention to a memory, with places added to its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, places: Tensor, memory: Tensor) -> Tensor:
        scores = self.q(x + places) @ self.k(memory).transpose(1, 2)
        return self.norm(x + self.o(scores.softmax(-1) @ self.v(memory)))


def test_a_norm_before_heads_that_compare_and_choose_is_a_heads() -> None:
    found = places(Proposals(), torch.randn(2, 7, D), torch.randn(2, 4, D))
    assert found["norm"] == "head"
    assert {found[f"decoder.{n}.norm"] for n in range(2)} == {"post"}
    assert found["encoder.0.norm"] == "pre"


class Pyramid(nn.Module):
    """Two stages of pre-norm blocks; a map of what the first one gives joins what is made of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(Pre(), Pre()), nn.Sequential(Pre(), Pre())
        self.merge, self.ends = nn.Linear(2 * D, D), nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.top, self.top_norm = nn.Conv2d(D, D, 3, padding=1), nn.GroupNorm(4, D)
        self.lateral, self.lateral_norm = nn.Conv2d(D, D, 1), nn.GroupNorm(4, D)
        self.out, self.out_norm = nn.Conv2d(D, D, 3, padding=1), nn.GroupNorm(4, D)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = self.second(self.merge(fine.reshape(x.shape[0], -1, 2 * D)))
        fine = self.ends[0](fine).transpose(1, 2).reshape(-1, D, 4, 8)
        coarse = self.ends[1](coarse).transpose(1, 2).reshape(-1, D, 4, 4)
        y = self.top_norm(self.top(coarse)).relu()
        y = F.interpolate(y, scale_factor=(1, 2)) + self.lateral_norm(self.lateral(fine))
        return self.out_norm(self.out(y)).relu()


def test_a_projection_around_a_stack_is_a_lateral_connection() -> None:
    found = places(Pyramid(), torch.randn(2, 32, D))
    assert {found[f"{stage}.{n}.norm"] for stage in ("first", "second") for n in range(2)} == {"pre"}
    assert found["ends.0"] == found["ends.1"] == "final"
    assert found["top_norm"] == found["lateral_norm"] == found["out_norm"] == "conv"
