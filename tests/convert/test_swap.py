"""swap: the same numbers from other kernels, a receipt that is true, and a way back to the bit."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.convert import ConversionError
from normkit.convert.swap import core, probe, swap, unswap, whole
from normkit.convert.swap.reclass import plan_of
from normkit.ops import called
from tests.audit.test_unchanged import state_of, world
from tests.convert.nets import IMAGE_NORMS, TEXT_NORMS, Gated, Llama, image, text

QUICK: dict[str, Any] = {"only_faster": False, "rounds": 0}
BUILDS: dict[str, tuple[Callable[..., tuple[nn.Module, Tensor]], set[str]]] = {
    "text": (text, TEXT_NORMS),
    "image": (image, IMAGE_NORMS),
}
# Whole models: sums in another order (float32); norms that compute in float32 whatever comes (float64); the roundings
# of a few layers, forward and backward, and gradients that are sums of much larger terms (bfloat16).
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 0.1}


def outputs_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, gradients and buffers of one step."""
    x = x.clone().requires_grad_()
    kept = [(b, b.clone()) for b in model.buffers()]
    y = model(x)
    y = list(y.values()) if isinstance(y, dict) else [y]
    seeds = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in y]
    gradients = torch.autograd.grad(y, [x, *model.parameters()], seeds)
    moved = [b.clone() for b, _ in kept]
    for b, before in kept:
        b.copy_(before)
    return [*(t.detach() for t in y), *gradients, *moved]


def close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        size = float(b.abs().max())
        assert float((a.double() - b.double()).abs().max()) <= tolerance * max(size, 1.0)


def no_further(got: list[Tensor], before: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    """As near to float64 as the original, or within a tolerance of it."""
    for a, b, e in zip(got, before, exact, strict=True):
        size = max(float(e.abs().max()), 1.0)
        ours, theirs = (float((t.double() - e).abs().max()) / size for t in (a, b))
        assert a.dtype == b.dtype and ours <= max(theirs, tolerance)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_the_same_numbers_on_kernels(name: str, dtype: torch.dtype, training: bool) -> None:
    build, expected = BUILDS[name]
    model, x = build(dtype)
    model.train(training)
    exact = outputs_of(copy.deepcopy(model).double(), x.double())
    before = outputs_of(model, x)
    receipt = swap(model, x, **QUICK)
    assert set(receipt.swapped) == expected, receipt.skipped
    assert receipt.skipped == ()
    after, operators = called(outputs_of, model, x)
    assert len(operators) >= 3
    if dtype == torch.bfloat16:  # torch's own sums of gradients can be off by a quarter, where one thread sums all
        no_further(after, before, exact, TOLERANCE[dtype])
    else:
        close(after, before, TOLERANCE[dtype])
    assert receipt.errors is not None
    measured, noise = receipt.errors.original, receipt.errors.noise
    assert (measured.outputs or 0) + (measured.gradients or 0) > 0
    assert (measured.outputs or 0) <= 3 * (noise.outputs or 0)  # as two roundings of one model
    receipt.undo()
    assert all(torch.equal(a, b) for a, b in zip(outputs_of(model, x), before, strict=True))


@pytest.mark.parametrize("name", BUILDS)
def test_the_other_mode_is_proven_as_well(name: str) -> None:
    build, _ = BUILDS[name]
    model, x = build()
    swap(model, x, **QUICK)
    plain, _ = build()
    got = outputs_of(model.train(), x)
    close(got, outputs_of(plain.train(), x), TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", BUILDS)
def test_nothing_but_classes_changes(name: str) -> None:
    model, x = BUILDS[name][0]()
    model.train()
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 != 0)
        p.grad = torch.ones_like(p) if i % 2 and p.requires_grad else None
    model.register_forward_hook(lambda *_: None)
    classes = {n: type(m) for n, m in model.named_modules()}
    before, around, kept = state_of(model), world(), x.clone()
    receipt = swap(model, x, **QUICK)
    assert receipt.swapped
    assert world() == around
    assert torch.equal(x, kept)
    after = state_of(model)
    for key, value in before.items():
        assert after[key][1:] == value[1:] if key.startswith("module ") else after[key] == value, key
    for n, m in model.named_modules():
        assert isinstance(m, classes[n])
        assert type(m).__name__ == classes[n].__name__
        assert (type(m) is classes[n]) == (n not in receipt.swapped)
    receipt.undo()
    assert state_of(model) == before


def test_hooks_go_on_being_called() -> None:
    model, x = text()
    seen: list[str] = []
    model.layer.register_forward_hook(lambda *_: seen.append("forward"))
    model.layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    swap(model, x, **QUICK)
    seen.clear()
    model(x.requires_grad_())["hidden"].sum().backward()
    assert sorted(seen) == ["backward"] * 2 + ["forward"] * 2 + ["pre"] * 2


def test_swapping_again_changes_nothing() -> None:
    model, x = text()
    first = swap(model, x, **QUICK)
    again = swap(model, x, **QUICK)
    assert again.swapped == ()
    assert {r.reason for r in again.skipped} == {"swapped already"}
    again.undo()
    assert plan_of(model.layer) is not None
    first.undo()
    assert unswap(model) == 0


def test_a_norm_written_inline_is_listed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    receipt = swap(Net(), torch.randn(3, 8), **QUICK)
    assert receipt.swapped == ("norm",)
    (skipped,) = receipt.skipped
    assert "inline" in skipped.reason


class Clipping(nn.Module):
    """A norm that is one for ordinary inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.layer_norm(x, x.shape[-1:])
        return torch.where(x.abs().amax() > 1e6, y * 2, y)


def test_a_norm_is_judged_by_its_own_inputs() -> None:
    model = nn.Sequential(nn.LayerNorm(8), Clipping())
    receipt = swap(model, torch.randn(4, 8), **QUICK)
    assert receipt.swapped == ("0", "1")
    receipt.undo()
    with torch.no_grad():
        model[0].weight.fill_(1e7)
    receipt = swap(model, torch.randn(4, 8), **QUICK)
    assert receipt.swapped == ("0",)
    assert "off from its spec" in receipt.skipped[0].reason


@pytest.mark.parametrize(
    ("wrong", "dtype", "word"),
    [
        ({"eps": 1e-4}, torch.float32, "off from its spec"),
        ({"eps": 1e-4}, torch.bfloat16, "off from its spec"),
        ({"weight_offset": 1.0}, torch.float32, "off from its spec"),
        ({"rounding": "after_gain"}, torch.bfloat16, "other bits"),
    ],
    ids=["eps", "eps in half precision", "gain", "order of rounding"],
)
def test_a_planted_wrong_spec_is_caught(
    wrong: dict[str, Any], dtype: torch.dtype, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = core.audit

    def lie(*args: Any, **kwargs: Any) -> Any:
        found = audit(*args, **kwargs)
        for record in found.norms:
            if record.name == "llama":
                assert record.spec is not None
                object.__setattr__(record, "spec", record.spec.replace(**wrong))
        return found

    monkeypatch.setattr(core, "audit", lie)
    torch.manual_seed(0)
    model, _ = text(dtype)
    x = torch.randn(8, 64, 24).to(dtype)
    receipt = swap(model, x, **QUICK)
    assert "llama" not in receipt.swapped
    assert type(model.llama) is Llama
    assert [word in r.reason for r in receipt.skipped] == [True]


def test_if_the_whole_proof_fails_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is off by 1 % only once the classes have changed."""
    model, x = text()
    before, wanted = state_of(model), outputs_of(model, x)
    give = whole.give

    def give_and_break(norms: Any) -> None:
        from normkit.convert.swap import plan

        give(norms)
        compute = plan.compute
        monkeypatch.setattr(plan, "compute", lambda *a, **k: compute(*a, **k) * 1.01)

    monkeypatch.setattr(whole, "give", give_and_break)
    with pytest.raises(ConversionError, match=r"outputs would be off by 0\.0\d+ .* 0\.0001 is allowed"):
        swap(model, x, **QUICK)
    assert state_of(model) == before
    assert all(torch.equal(a, b) for a, b in zip(outputs_of(model, x), wanted, strict=True))


def test_strict_refuses_above_a_tolerance() -> None:
    model, x = text()
    before = state_of(model)
    with pytest.raises(ConversionError, match="is allowed"):
        swap(model, x, strict=1e-12, **QUICK)
    assert state_of(model) == before
    assert swap(model, x, strict=1e-5, **QUICK).swapped


def test_an_interruption_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = text()
    before = state_of(model)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(whole, "compare_model", stop)
    with pytest.raises(KeyboardInterrupt):
        swap(model, x, **QUICK)
    assert state_of(model) == before


def test_slower_norms_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from normkit.convert import timing

    verdicts = {"layer": True, "rms": False}
    model = nn.Sequential()
    model.add_module("layer", nn.LayerNorm(8))
    model.add_module("rms", nn.RMSNorm(8))
    now: list[str] = []
    twin = probe.twin

    def noted(module: nn.Module, *args: Any) -> nn.Module:
        now[:] = ["layer" if isinstance(module, nn.LayerNorm) else "rms"]
        return twin(module, *args)

    from normkit.convert.swap import speed

    monkeypatch.setattr(speed, "twin", noted)
    monkeypatch.setattr(timing, "is_slower", lambda _: verdicts[now[0]])
    receipt = swap(model, torch.randn(4, 8), rounds=1)
    assert receipt.swapped == ("rms",)
    assert "slower" in receipt.skipped[0].reason
    change = receipt.changed[0]
    assert change.speed is not None and change.backward_speed is not None
    assert receipt.speed is not None and receipt.backward_speed is not None and receipt.speed.ratio > 0


def test_slower_with_a_gradient_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from normkit.convert import timing

    answers = iter([False, True])
    monkeypatch.setattr(timing, "is_slower", lambda _: next(answers))
    model = nn.Sequential(nn.RMSNorm(8))
    x = torch.randn(4, 8)
    receipt = swap(model, x, rounds=0)
    assert receipt.changed[0].what.endswith("where no gradient is recorded")
    assert not called(model, x)[1]
    with torch.no_grad():
        assert called(model, x)[1] == {"rms_norm"}


def test_an_attribute_that_changes_gives_the_norm_back() -> None:
    model, x = text()
    receipt = swap(model, x, **QUICK)
    with pytest.warns(UserWarning, match=r"epsilon of a swapped Llama was set to 0\.5"):
        model.llama.epsilon = 0.5
    assert type(model.llama) is Llama
    plain, _ = text()
    plain.llama.epsilon = 0.5
    close(outputs_of(model, x), outputs_of(plain, x), TOLERANCE[torch.float32])
    model.layer.eps = model.layer.eps  # the same value is no change
    model.layer.note = "new"  # nor is an attribute that the norm did not have
    model.train()
    assert plan_of(model.layer) is not None
    receipt.undo()
    assert unswap(model) == 0
    assert model.llama.epsilon == 0.5


def test_calls_of_another_kind_take_the_own_forward() -> None:
    model, x = text()
    swap(model, x, **QUICK)
    plain, _ = text()
    gated, reference = model.gated, plain.gated
    assert isinstance(gated, Gated)
    assert called(gated, x, x)[1] == {"gated_rms_norm_with_statistics"}
    assert called(gated, gate=x, hidden_states=x)[1] == {"gated_rms_norm_with_statistics"}
    for args in ((x,), (x, None)):
        y, operators = called(gated, *args)
        assert not operators
        assert torch.equal(y, reference(*args))
    with pytest.raises(TypeError, match="unexpected keyword"):
        gated(x, mask=x)
    assert torch.equal(gated(x[:0], x[:0]), reference(x[:0], x[:0]))


def test_a_batch_of_one_still_raises() -> None:
    model, x = image()
    swap(model, x, **QUICK)
    with pytest.raises(ValueError, match="more than 1 value"):
        model.batch.train()(torch.randn(1, 12, 1, 1))


def test_narrow_norms_in_half_precision() -> None:
    """No kernel rounds at every step: one that rounds once is nearer to float64, and can be declined."""
    model, x = text(torch.bfloat16)
    receipt = swap(model, x, **QUICK)
    change = next(c for c in receipt.changed if c.name == "narrow")
    assert change.what.endswith("rounded once")
    assert change.errors is not None
    assert (change.errors.exact.outputs or 1) <= (change.errors.noise.outputs or 0)
    receipt.undo()
    receipt = swap(model, x, same_rounding=True, **QUICK)
    assert [r.name for r in receipt.skipped] == ["narrow"]
    receipt.undo()
    model, x = text()  # in float32 there is nothing to decline, until the model is cast
    assert "narrow" in swap(model, x, same_rounding=True, **QUICK).swapped
    half = model.narrow.bfloat16()
    y, operators = called(half, x.bfloat16())
    assert not operators
    assert torch.equal(
        y, half.weight.detach() * (x.bfloat16() * torch.rsqrt(x.bfloat16().pow(2).mean(-1, keepdim=True) + 1e-5))
    )


@pytest.mark.parametrize("norm", [lambda: Llama(6), lambda: nn.LayerNorm(6), lambda: nn.RMSNorm(6, 1e-6)])
def test_results_lie_in_memory_as_before(norm: Callable[[], nn.Module]) -> None:
    """A transposed input of eager operators gives a transposed output, and the model may view it."""
    plain, model = norm(), nn.Sequential(norm())
    swap(model, torch.randn(2, 3, 4, 6), **QUICK)
    for x in (torch.randn(2, 4, 3, 6).transpose(1, 2), torch.randn(3, 2, 4, 6).permute(1, 2, 0, 3), torch.randn(2, 6)):
        y, operators = called(model, x)
        assert operators
        assert y.stride() == plain(x).stride()
        close([y], [plain(x)], 1e-6)


def test_a_model_cast_later_keeps_its_order_of_rounding() -> None:
    model, x = text()
    swap(model, x, **QUICK)
    plain, _ = text()
    x = torch.randn(64, 24).bfloat16()
    for name in ("llama", "gemma", "layer"):
        y, operators = called(getattr(model, name).bfloat16(), x)
        assert operators
        assert float((y != getattr(plain, name).bfloat16()(x)).float().mean()) < 0.01


def test_frozen_parameters_and_models_without_gradients() -> None:
    model, _ = text()
    model.requires_grad_(False)
    receipt = swap(model, torch.randint(0, 3, (2, 7, 24)).float(), **QUICK)
    assert set(receipt.swapped) == TEXT_NORMS
    assert receipt.errors is not None and receipt.errors.original.gradients is not None  # of the input
    receipt.undo()
    embedded = nn.Sequential(nn.Embedding(5, 24), model).requires_grad_(False)
    receipt = swap(embedded, torch.randint(0, 5, (2, 7)), **QUICK)
    assert receipt.errors is not None and receipt.errors.original.gradients is None


def test_inputs_are_guessed_from_a_config() -> None:
    from tests.zoo import build

    model = build("gpt2").model
    assert len(swap(model, **QUICK).swapped) == 5


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (lambda: nn.LayerNorm(4, device="meta"), (torch.randn(2, 4),), "weight is on the meta device"),
        (lambda: nn.Sequential(nn.LayerNorm(4)), (), "has no config.*give example inputs"),
        (lambda: nn.LayerNorm(4), (torch.randn(2, 5),), "give inputs that fit"),
        (lambda: nn.LazyBatchNorm1d(), (torch.randn(2, 5),), "not initialized"),
    ],
    ids=["meta", "no inputs", "inputs that do not fit", "lazy"],
)
def test_what_cannot_be_proven_is_refused(model: Callable[[], nn.Module], args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        swap(model(), *args)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="Module"):
        swap(torch.randn(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strict"):
        swap(nn.LayerNorm(4), torch.randn(2, 4), strict=-1.0)
    with pytest.raises(ValueError, match="rounds"):
        swap(nn.LayerNorm(4), torch.randn(2, 4), rounds=-1)


def test_unfit_modules_are_left() -> None:
    model = nn.ModuleDict({"bound": nn.LayerNorm(8), "sync": nn.SyncBatchNorm(8), "plain": nn.LayerNorm(8)})
    model["bound"].forward = model["bound"].forward  # as wrappers do

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["plain"](self.parts["sync"](self.parts["bound"](x)))

    receipt = swap(Net().eval(), torch.randn(4, 8), **QUICK)
    reasons = {r.name.split(".")[-1]: r.reason for r in receipt.skipped}
    assert receipt.swapped == ("parts.plain",)
    assert "between processes" in reasons["sync"]
    assert "replaced on the instance" in reasons["bound"]


def test_norms_on_kernels_already_are_left() -> None:
    import normkit

    receipt = swap(nn.Sequential(normkit.nn.LayerNorm(8), nn.LayerNorm(8)), torch.randn(4, 8), **QUICK)
    assert receipt.swapped == ("1",)
    assert "native kernel already" in receipt.skipped[0].reason


WITHOUT = """
import torch
from normkit.convert.swap import swap
model = torch.nn.Sequential(torch.nn.LayerNorm(8))
receipt = swap(model, torch.randn(4, 8))
assert receipt.swapped == () and type(model[0]) is torch.nn.LayerNorm
(skipped,) = receipt.skipped
assert "no native kernel here" in skipped.reason and "NORMKIT_NO_NATIVE" in skipped.reason, skipped
receipt.undo()
print("fine")
"""


def test_without_the_extension_nothing_is_swapped() -> None:
    env = {**os.environ, "NORMKIT_NO_NATIVE": "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr


def test_random_runs_are_compared_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8)).train()
    receipt = swap(model, torch.randn(16, 8), **QUICK)
    assert receipt.swapped == ("2",)
    assert receipt.errors is not None and (receipt.errors.original.outputs or 0) < 1e-6
    assert any("random" in n for n in receipt.notes)
