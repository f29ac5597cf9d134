"""Wirings met in speech, vision and hybrid models, in outline."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit import audit
from tests.audit.test_place_general import D, Pre, mlp, places

X = torch.randn(2, 6, D)


class SelfAttention(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class NormedTwice(nn.Module):
    """A post-norm block that ends by normalizing the stream once more (a conformer's last norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.first = SelfAttention(), nn.LayerNorm(D)
        self.mlp, self.second, self.last = mlp(), nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.attention(x))
        return self.last(self.second(x + self.mlp(x)))


def test_a_norm_of_a_norm_on_the_stream_is_post_like_the_second() -> None:
    found = places(nn.Sequential(nn.Linear(D, D), NormedTwice(), NormedTwice(), NormedTwice(), nn.Linear(D, D)), X)
    middle = {place for name, place in found.items() if not name.startswith("3")}
    assert middle == {"post"}


class ConvMlp(nn.Module):
    """A feed-forward layer made of convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(D, 2 * D, 3, padding=1), nn.Conv1d(2 * D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x.transpose(1, 2)))).transpose(1, 2)


def test_a_transformer_whose_feed_forward_is_convolutions_is_no_convolutional_stream() -> None:
    blocks = [block for _ in range(2) for block in (Pre(ConvMlp()), Pre(SelfAttention()), Pre(ConvMlp()))]
    found = places(nn.Sequential(nn.Linear(D, D), *blocks, nn.LayerNorm(D)), X)
    assert list(found.values()) == ["pre"] * 6 + ["final"]


def test_without_attention_it_is_one() -> None:
    found = places(nn.Sequential(nn.Linear(D, D), *[Pre(ConvMlp()) for _ in range(3)]), X)
    assert set(found.values()) == {"conv"}


class Scan(nn.Module):
    """A state-space mixer with two sums of its own (chunks, and a skip) and a norm before its last map."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.within, self.across, self.out = (nn.Linear(D, D) for _ in range(4))
        self.skip, self.norm = nn.Parameter(torch.rand(D)), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.inside(x))
        y = self.within(x) + self.across(torch.tanh(self.within(x)))
        return self.out(self.norm(y + self.skip * x))


class Hybrid(nn.Module):
    """A shared transformer's output joins what a mixer reads, and not the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mixer = SelfAttention(), nn.LayerNorm(D), Scan()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x + self.attention(x)))


def test_sums_inside_a_mixer_are_no_stream_be_there_two_and_a_norm_behind() -> None:
    found = places(nn.Sequential(nn.Linear(D, D), Pre(Scan()), Hybrid(), Pre(Scan()), Hybrid(), nn.LayerNorm(D)), X)
    assert {n: p for n, p in found.items() if "mixer" in n or "branch" in n} == {
        "1.branch.norm": "inner", "2.mixer.norm": "inner", "3.branch.norm": "inner", "4.mixer.norm": "inner",
    }  # fmt: skip
    assert {p for n, p in found.items() if n in ("1.norm", "2.norm", "3.norm", "4.norm")} == {"pre"}
    assert found["5"] == "final"


class Adapter(nn.Module):
    """Attention and shortcut each shorten the sequence by a gated convolution, each behind a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut_norm, self.norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.shortcut, self.shorten = nn.Conv1d(D, 2 * D, 2, 2), nn.Conv1d(D, 2 * D, 2, 2)
        self.attention, self.mlp_norm, self.mlp = SelfAttention(), nn.LayerNorm(D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        kept = F.glu(self.shortcut(self.shortcut_norm(x).transpose(1, 2)), 1).transpose(1, 2)
        short = F.glu(self.shorten(self.norm(x).transpose(1, 2)), 1).transpose(1, 2)
        x = kept + self.attention(short)
        return x + self.mlp(self.mlp_norm(x))


def test_norms_of_a_gated_shortcut_and_of_its_branch() -> None:
    found = places(nn.Sequential(nn.Linear(D, D), Pre(), Pre(SelfAttention()), Adapter(), nn.LayerNorm(D)), X)
    assert [found[f"3.{n}"] for n in ("shortcut_norm", "norm", "mlp_norm")] == ["pre"] * 3
    assert found["4"] == "final"


class SharedQueries(nn.Module):
    """Keys are normalized queries, and the softmax is written as a logsumexp (hashed attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.out = (nn.Linear(D, D) for _ in range(3))
        self.norm = nn.LayerNorm(D, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.qk(x)
        scores = q @ self.norm(q).transpose(-1, -2)
        return self.out(torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ self.v(x))


def test_a_softmax_written_as_a_logsumexp() -> None:
    found = places(nn.Sequential(nn.Linear(D, D), Pre(SharedQueries()), Pre()), X)
    assert found["1.branch.norm"] == "qk"


class OnTheSphere(nn.Module):
    """Streams and branches are unit vectors, and a step is taken from one to the other (nGPT)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(), mlp()
        self.rates = nn.Parameter(torch.full((2, D), 0.2))

    @staticmethod
    def unit(x: Tensor) -> Tensor:
        return x / x.norm(p=2, dim=-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        for rate, branch in zip(self.rates, (self.attention, self.mlp), strict=True):
            start, end = self.unit(x), self.unit(branch(x))
            x = self.unit(start + rate * (end - start))
        return x


def test_a_stream_that_is_normalized_before_and_after_each_sum() -> None:
    model = nn.Sequential(nn.Linear(D, D), OnTheSphere(), OnTheSphere(), OnTheSphere(), nn.Linear(D, D))
    result = audit(model, X)
    found = {norm.name: norm.placement for norm in result.norms}
    assert [found[f"2#{n}"] for n in range(6)] == ["post", "output", "post", "post", "output", "post"]
    assert found["3#5"] == "post"
    assert [branch.placement for branch in result.branches] == ["post"] * 6
    assert result.findings == ()


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_linear_map_is_a_map() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(Pre(mlp()), Pre(mlp()), nn.LayerNorm(D)), {nn.Linear})
    assert list(places(model, X).values()) == ["pre", "pre", "final"]


class Resampler(nn.Module):
    """Learned queries, copied for each sample by a product with ones, attend to a context and to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, D))
        self.norm, self.context = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.mlp = Pre(mlp())

    def forward(self, x: Tensor) -> Tensor:
        latents = self.queries[None] * torch.ones(len(x))[:, None, None]
        normed = self.norm(latents)
        k, v = self.kv(torch.cat((self.context(x), normed), 1)).chunk(2, -1)
        return self.mlp(self.out(torch.softmax(self.q(normed) @ k.transpose(-1, -2), -1) @ v) + latents)


def test_a_stream_of_learned_queries_that_a_product_copies() -> None:
    found = places(nn.Sequential(nn.Linear(D, D), Pre(mlp()), Resampler(), nn.Linear(D, D)), X)
    assert found == {"1.norm": "pre", "2.norm": "pre", "2.context": "pre", "2.mlp.norm": "pre"}


class Experts(nn.Module):
    """The best experts of each token, weighed by router scores that are normalized by their length."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(D, 4), chosen
        self.experts = nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, best = torch.topk(self.router(x).softmax(-1), self.chosen, -1)
        weights = weights / torch.norm(weights, p=2, dim=-1, keepdim=True)
        each = torch.stack([expert(x) for expert in self.experts], -2)
        return (each.gather(-2, best[..., None].expand(*best.shape, D)) * weights[..., None]).sum(-2)


@pytest.mark.parametrize("chosen", [2, 3])
def test_normalized_weights_of_experts_are_inside_the_branch_and_not_its_output(chosen: int) -> None:
    torch.manual_seed(0)
    result = audit(nn.Sequential(nn.Linear(D, D), Pre(Experts(chosen)), Pre(Experts(chosen)), nn.LayerNorm(D)), X)
    inline = {(norm.kind, norm.placement) for norm in result.norms if norm.functional}
    assert inline == {("l2", "inner")}
    assert [branch.placement for branch in result.branches] == ["pre", "pre"]
