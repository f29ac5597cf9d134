"""Each rule has a model that fires it and one, as near as can be, that does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit
from normkit.audit import Audit, audit
from normkit.audit.load import load
from normkit.audit.rules import RULES
from normkit.audit.rules.families import Convention, measure, table
from normkit.audit.rules.schedules import warms_up


class PlainRMS(nn.Module):
    """RMSNorm in the input's dtype, or (upcast) with a float32 statistic."""

    def __init__(self, dim: int, eps: float, upcast: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim) + 0.1 * torch.arange(dim) / dim)
        self.eps, self.upcast = eps, upcast

    def forward(self, x: Tensor) -> Tensor:
        z = x.float() if self.upcast else x
        return self.weight * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def half(eps: float, upcast: bool, dtype: torch.dtype = torch.float16) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (
        nn.Sequential(nn.Linear(16, 16), PlainRMS(16, eps, upcast)).to(dtype), torch.randn(2, 5, 16).to(dtype)
    )  # fmt: skip


def code_of(rule: str) -> list[str]:
    """The two blocks of a rule's page: the example and its fix."""
    return re.findall(r"```python\n(.*?)```", RULES[rule].page(), re.DOTALL)


def run(make: Callable[[], tuple[nn.Module, Tensor]]) -> Audit:
    torch.manual_seed(0)
    model, x = make()
    return audit(model, x)


@pytest.fixture
def no_process_group() -> Iterator[None]:
    """What an example leaves behind if it raises must not meet the next one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("no_process_group")
def test_the_pages_example_fires_and_its_fix_does_not(rule: str) -> None:
    torch.manual_seed(0)
    example, fix = code_of(rule)
    scope: dict[str, Any] = {}
    exec(example, scope)
    (finding,) = [f for f in scope["result"].findings if f.rule == rule]
    assert finding.severity == RULES[rule].severity
    assert finding.where and finding.message and finding.fix
    exec(fix, scope)
    assert rule not in [f.rule for f in scope["result"].findings]


@pytest.mark.parametrize("rule", RULES)
def test_a_page_says_what_why_how_and_whence(rule: str) -> None:
    sections = re.findall(r"^## (.*)$", RULES[rule].page(), re.MULTILINE)
    assert sections == ["What", "Why", "Example", "How to fix", "Source"]


def test_norms_with_one_fault_are_one_finding() -> None:
    model = nn.Sequential(PlainRMS(16, 1e-9, upcast=False), PlainRMS(16, 1e-9, upcast=False)).half()
    found = [f.where for f in audit(model, torch.randn(2, 5, 16).half()).findings if f.rule == "eps-vanishes"]
    assert found == [("0", "1")]


def test_bfloat16_has_float32s_range_so_nothing_overflows() -> None:
    rules = {f.rule for f in run(half(1e-9, upcast=False, dtype=torch.bfloat16)).findings}
    assert rules.isdisjoint({"statistic-overflow", "eps-vanishes"})


def test_the_reported_overflow_is_real() -> None:
    """The model that fires does return 0 for 300, and the one that does not returns about 1."""
    x = torch.full((1, 16), 300.0, dtype=torch.float16)
    bad, good = PlainRMS(16, 1e-3, upcast=False).half(), PlainRMS(16, 1e-3, upcast=True).half()
    assert bad(x).abs().max() == 0
    assert good(x).min() > 0.9


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_own_transformers(norm_first: bool) -> None:
    """nn.TransformerEncoder with norm_first ends without a norm; nn.Transformer in post-norm ends in two."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    rules = {f.rule for f in audit(encoder, torch.randn(2, 5, 16)).findings}
    assert ("missing-final-norm" in rules) == norm_first
    whole = nn.Transformer(16, 2, 2, 2, 32, batch_first=True, norm_first=norm_first).eval()
    rules = {f.rule for f in audit(whole, torch.randn(2, 5, 16), torch.randn(2, 4, 16)).findings}
    assert ("double-final-norm" in rules) == (not norm_first)
    assert "missing-final-norm" not in rules


def test_a_final_norm_over_another_stream_is_no_second_one() -> None:
    """ResiDual ends in a post-norm, to which it adds a norm of the stream that was never normalized."""
    torch.manual_seed(0)
    model = normkit.Transformer(placement="resi_dual", vocab=50, dim=16, heads=2, depth=3).eval()
    assert "double-final-norm" not in [f.rule for f in audit(model, torch.randint(0, 50, (2, 6))).findings]


def test_a_last_post_norm_may_be_called_final() -> None:
    torch.manual_seed(0)
    model = normkit.Transformer(placement="hybrid", vocab=50, dim=16, heads=2, depth=3).eval()
    result = audit(model, torch.randint(0, 50, (2, 6)))
    assert result["stack.final_norm"].placement == "post"
    assert "misleading-name" not in [f.rule for f in result.findings]


@pytest.mark.parametrize(
    ("make", "rises"),
    [
        (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 500)), True),
        (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, total_steps=1000), True),
        (
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o,
                [torch.optim.lr_scheduler.LinearLR(o, 0.01, total_iters=100),
                 torch.optim.lr_scheduler.CosineAnnealingLR(o, 900)],
                [100],
            ),
            True,
        ),
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000), False),
        (lambda o: torch.optim.lr_scheduler.StepLR(o, 5), False),
        (lambda o: None, False),
    ],
)  # fmt: skip
def test_warm_up_is_seen_on_a_copy(make: Callable[[Any], Any], rises: bool) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    scheduler = make(optimizer)
    before = [group["lr"] for group in optimizer.param_groups], scheduler and scheduler.state_dict()["last_epoch"]
    assert warms_up(scheduler, optimizer) == rises
    after = [group["lr"] for group in optimizer.param_groups], scheduler and scheduler.state_dict()["last_epoch"]
    assert before == after


@pytest.mark.parametrize("name", ["llama", "nemotron", "gpt2"])
def test_the_table_of_families_is_what_is_measured(name: str) -> None:
    assert tuple(Convention(**row) for row in measure([name])[name]) == table()[name]


def test_gains_of_trained_models_are_believed() -> None:
    """Small gains of one sign, wide ones, and constant ones contradict no convention."""
    torch.manual_seed(0)
    noise = torch.randn(64)
    plain = (torch.rand(64) * 0.1, torch.zeros(64), 1 + 0.2 * noise)
    less_one = (torch.ones(64), 4 * torch.rand(64), noise)
    for offset, gain in (*((0.0, g) for g in plain), *((1.0, g) for g in less_one)):
        model = nn.Sequential(nn.Linear(64, 64), normkit.nn.RMSNorm(64, weight_offset=offset))
        model[1].load_state_dict({"weight": gain})
        assert "gain-offset" not in [f.rule for f in audit(model, torch.randn(2, 64)).findings], (offset, gain.mean())


def test_the_pretrained_demo_model_is_clean() -> None:
    loaded = load("minilm")
    assert audit(loaded.model, loading=loaded.report, **loaded.kwargs).findings == ()


def test_rules_leave_the_model_as_it_was() -> None:
    """Those that run it again, backward too, move no buffer, no gradient and no random state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    audit(model, torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state) and model.training


@pytest.mark.parametrize("ends", [False, True])
def test_gains_of_both_signs_where_they_are_common(ends: bool) -> None:
    """Of batch norms (RepVGG starts them so), and of norms that end a branch, which many models start at 0."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64) if ends else nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.linear(x)) if ends else self.norm(self.linear(x))

    model = nn.Sequential(Block(), Block(), Block(), nn.LayerNorm(64)).eval()
    for block in model[:3]:
        nn.init.normal_(block.norm.weight, 0.0, 0.1)  # type: ignore[union-attr, arg-type]
    x = torch.randn(4, 64)
    assert "gain-offset" not in [f.rule for f in audit(model, x).findings]
    nn.init.normal_(model[3].weight, 0.0, 0.1)  # type: ignore[arg-type]
    assert "gain-offset" in [f.rule for f in audit(model, x).findings]


def test_a_pyramid_on_a_convolutional_stream_lacks_no_final_norm() -> None:
    class Block(nn.Module):
        def __init__(self, given: int, width: int) -> None:
            super().__init__()
            step = 1 if given == width else 2
            self.up, self.up_norm = nn.Conv2d(given, width, 3, step, 1), nn.BatchNorm2d(width)
            self.down, self.down_norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
            shortcut = nn.Sequential(nn.Conv2d(given, width, 1, step), nn.BatchNorm2d(width))
            self.shortcut = nn.Identity() if step == 1 else shortcut

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            branch = self.down_norm(self.down(torch.relu(self.up_norm(self.up(x)))))
            return torch.relu(branch + self.shortcut(x))

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (8, 12, 16)
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.stages = nn.ModuleList(
                nn.Sequential(Block(i, o), Block(o, o)) for i, o in zip((8, *widths), widths, strict=False)
            )
            self.across = nn.ModuleList(nn.Sequential(nn.Conv2d(w, 8, 1), nn.GroupNorm(4, 8)) for w in widths)
            self.head = nn.Conv2d(8, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            levels = []
            for stage, across in zip(self.stages, self.across, strict=True):
                x = stage(x)
                levels.append(across(x))
            total = levels[2]
            for level in levels[1::-1]:
                total = level + nn.functional.interpolate(total, scale_factor=2)
            return self.head(total)

    result = audit(Pyramid().eval(), torch.randn(2, 3, 16, 16))
    assert result["across.0.1"].placement == "conv"  # a level of the pyramid ends no branch of the stream
    assert "missing-final-norm" not in [f.rule for f in result.findings]


class DeltaRule(nn.Module):
    """Keys are first mixed over the tokens of a chunk, by weights that they make; then they meet the queries."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        mixed = torch.tril((k.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)).softmax(-1) @ k
        return x + self.out((q @ (mixed.transpose(-1, -2) @ v)).transpose(1, 2).flatten(-2))


def test_a_sum_over_tokens_is_no_head() -> None:
    torch.manual_seed(0)
    result = audit(nn.Sequential(nn.Linear(12, 12), DeltaRule(12, 3), DeltaRule(12, 3)), torch.randn(2, 5, 12))
    assert sum(norm.kind == "l2" for norm in result.norms) == 4
    assert "qk-norm-axis" not in [f.rule for f in result.findings]


@pytest.mark.parametrize(("part", "fires"), [("bert", False), ("an unknown type", False), ("modernbert", True)])
def test_a_family_is_held_against_a_model_only_if_all_its_parts_are_known(part: str, fires: bool) -> None:
    config = {"model_type": "of two", "one": {"model_type": "modernbert"}, "two": {"model_type": part}}
    result = audit(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 5, 8), config=config)
    assert ("unexpected-bias" in [f.rule for f in result.findings]) is fires
