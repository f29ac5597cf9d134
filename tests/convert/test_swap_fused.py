"""swap(fuse_residual=True): the same bits from one call less, and the block's own way wherever that would show."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normkit.convert import ConversionError
from normkit.convert.receipt import deviation
from normkit.convert.swap import fuse as fuse_module
from normkit.convert.swap import swap, unswap
from normkit.convert.swap.rewrite import Unreadable
from tests.convert.check import Snapshot, trained
from tests.convert.fused import (
    IDS,
    QUICK,
    Block,
    fused_calls,
    hugging_face,
    reasons,
    same_bits,
    stack,
    step,
    whats,
)

FAMILIES = {
    "llama": "post_attention_layernorm",
    "qwen2": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "gpt2": "ln_2",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_bits_of_the_plain_swap(family: str, dtype: torch.dtype) -> None:
    """Outputs always; in bfloat16 the gradient of a sum is rounded once where autograd adds two rounded ones."""
    model = hugging_face(family).to(dtype)
    exact = step(copy.deepcopy(model).double(), input_ids=IDS)
    plain = copy.deepcopy(model)
    swap(plain, input_ids=IDS, use_cache=False, only_faster=False, rounds=0)
    receipt = swap(model, input_ids=IDS, use_cache=False, **QUICK)
    layers = "transformer.h" if family == "gpt2" else "model.layers"
    assert whats(receipt) == {f"{layers}.{i}": FAMILIES[family] for i in range(2)}
    assert all(c.errors is not None and c.errors.original.outputs == 0 for c in receipt.fused)
    assert fused_calls(lambda: model(input_ids=IDS)) == 2
    for training in (False, True):
        model.train(training), plain.train(training)
        new, old = step(model, input_ids=IDS), step(plain, input_ids=IDS)
        assert torch.equal(new[0], old[0])
        off = [deviation(n, e) for n, e in zip(new[1:], exact[1:], strict=True)]
        was = [deviation(o, e) for o, e in zip(old[1:], exact[1:], strict=True)]
        assert max(off) <= max(1.25 * max(was), 1e-5), (max(off), max(was))
        assert sum(off) <= max(1.05 * sum(was), 1e-5 * len(was))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cache_gives_the_same_tokens(family: str) -> None:
    model = hugging_face(family)
    how = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    expected = model.generate(IDS[:, :5], **how)
    swap(model, input_ids=IDS, **QUICK)
    got: list[Tensor] = []
    assert fused_calls(lambda: got.append(model.generate(IDS[:, :5], **how))) == 16
    assert torch.equal(got[0], expected)


def test_gradient_checkpointing() -> None:
    """transformers' layers wrap the forward of every subclass, and the outermost one checkpoints: only one may."""
    model = hugging_face("llama").train()
    expected = step(model, input_ids=IDS)
    swap(model, input_ids=IDS, use_cache=False, **QUICK)
    plain = step(model, input_ids=IDS)
    model.gradient_checkpointing_enable()
    got: list[list[Tensor]] = []
    assert fused_calls(lambda: got.append(step(model, input_ids=IDS))) == 4  # each layer once more in the backward
    same_bits(got[0], plain)
    for a, b in zip(plain, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_undo_gives_every_bit_and_class_back() -> None:
    model = hugging_face("llama")
    classes, snapshot = [type(m) for m in model.modules()], Snapshot(model)
    before = model(input_ids=IDS).logits
    receipt = swap(model, input_ids=IDS, **QUICK)
    snapshot.assert_same()
    assert [type(m) for m in model.modules()] != classes
    assert all(
        isinstance(m, c) and type(m).__name__ == c.__name__ for m, c in zip(model.modules(), classes, strict=True)
    )
    receipt.undo()
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(input_ids=IDS).logits, before)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_fused_too(way: Callable[[nn.Module], nn.Module]) -> None:
    model, x = stack(Block)
    receipt = swap(model, x, **QUICK)
    expected = model(x)
    twin = way(model)
    receipt.undo()
    assert fused_calls(lambda: twin(x)) == 2
    assert torch.equal(twin(x), expected)
    assert unswap(twin) == 6
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]


def test_a_copy_that_finds_no_source_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(Block)
    swap(model, x, **QUICK)
    data, expected = pickle.dumps(model), model(x)

    def unreadable(*_: Any) -> Any:
        raise Unreadable("no source")

    monkeypatch.setattr(fuse_module, "_CLASSES", {})
    monkeypatch.setattr(fuse_module, "rewrite", unreadable)
    twin = pickle.loads(data)
    assert type(twin[0]) is Block and torch.equal(twin(x), expected)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_compiled_once_it_is_one_operator(training: bool) -> None:
    model, x = stack(Block)
    swap(model.train(training), x, **QUICK)
    x.requires_grad_(training)
    expected = model(x)
    graphs: list[str] = []

    def see(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=see)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(compiled(x), expected)
    assert len(graphs) == 1 and graphs[0].count("normkit.add_rms_norm") == 2


def test_bert_adds_in_the_call() -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = trained(BertModel(BertConfig(**shape, vocab_size=64))).eval()
    before = model(input_ids=IDS).last_hidden_state
    receipt = swap(model, input_ids=IDS, **QUICK)
    layer = "encoder.layer.0"
    assert whats(receipt) == {f"{layer}.attention.output": "LayerNorm", f"{layer}.output": "LayerNorm"}
    torch.testing.assert_close(model(input_ids=IDS).last_hidden_state, before, rtol=1e-5, atol=1e-5)


def test_a_hook_on_the_norm_is_respected() -> None:
    """Put there before: left, with the reason. Put there after: the norm is called as ever, until it is taken off."""
    model, x = stack(Block)
    seen: list[Tensor] = []
    handle = model[0].second.register_forward_hook(lambda _, args, y: seen.append(args[0]))
    receipt = swap(model, x, **QUICK)
    assert whats(receipt) == {"1": "second"} and "hook" in reasons(receipt)["0.second"]
    handle.remove()
    receipt.undo()
    swap(model, x, **QUICK)
    plain = model(x)
    seen.clear()
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(model[0].second, register)(lambda *a: seen.append(a[0]))
        assert fused_calls(lambda: model(x.clone().requires_grad_()).sum().backward()) == 1
        assert len(seen) == 1
        torch.testing.assert_close(model(x), plain, rtol=1e-5, atol=1e-5)
        handle.remove()
        seen.clear()
    handle = nn.modules.module.register_module_forward_hook(lambda m, _, y: seen.append(m))
    assert fused_calls(lambda: model(x)) == 0 and model[0].second in seen
    handle.remove()
    assert fused_calls(lambda: model(x)) == 2


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_where_the_proof_does_not_reach_the_block_does_as_before() -> None:
    model, x = stack(Block)
    original = copy.deepcopy(model)
    swap(model, x, **QUICK)
    with Watch() as watch:
        model(x)
    assert watch.names.count("aten::add.Tensor") >= 4
    torch.testing.assert_close(torch.func.vmap(model)(x), torch.func.vmap(original)(x))
    jvps = [torch.func.jvp(m, (x,), (torch.ones_like(x),)) for m in (model, original)]
    torch.testing.assert_close(*jvps)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), original(x))
    model[0].second.forward = lambda total: total * 0
    assert fused_calls(lambda: model(x)) == 1
    torch.testing.assert_close(model[0](x), x + original[0].mix(original[0].first(x)) + original[0].feed.bias)
    del model[0].second.forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0].second.eps = original[0].second.eps = 0.5
    assert fused_calls(lambda: model(x)) == 1
    torch.testing.assert_close(model(x), original(x))
    model[1].second = original[1].second = nn.Identity()
    assert fused_calls(lambda: model(x)) == 0
    torch.testing.assert_close(model(x), original(x))


def test_an_operator_with_other_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fuse_module.fused

    def off(*args: Any) -> Any:
        both = original(*args)
        return None if both is None else (both[0] * (1 + 1e-6), both[1])

    monkeypatch.setattr(fuse_module, "fused", off)
    model, x = stack(Block)
    receipt = swap(model, x, **QUICK)
    assert receipt.fused == () and "other bits" in reasons(receipt)["0.second"]


def test_slower_pairs_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for slower in (True, False):
        monkeypatch.setattr(fuse_module.timing, "is_slower", lambda _, slower=slower: slower)
        model, x = stack(Block)
        with monkeypatch.context() as only:
            only.setattr("normkit.convert.swap.core.time_norm", lambda *_: "")
            receipt = swap(model, x, rounds=0, fuse_residual=True)
        assert len(receipt.fused) == (0 if slower else 2)
        if slower:
            assert "slower" in reasons(receipt)["1.second"]
        else:
            assert all(c.speed and c.backward_speed for c in receipt.fused)
            assert {"fused", "unfused"} <= receipt.to_dict().keys()


@pytest.mark.parametrize("late", ["normkit.convert.swap.fuse.compare_model", "normkit.convert.swap.core.time_model"])
def test_what_fails_late_undoes_blocks_and_norms(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(Block)
    classes = [type(m) for m in model.modules()]

    def failing(*_: Any) -> Any:
        assert type(model[0]) is not Block
        raise ConversionError("off")

    monkeypatch.setattr(late, failing)
    with pytest.raises(ConversionError, match="off"):
        swap(model, x, **QUICK)
    assert [type(m) for m in model.modules()] == classes


def test_it_is_only_done_when_asked() -> None:
    model, x = stack(Block)
    receipt = swap(model, x, only_faster=False, rounds=0)
    assert type(model[0]) is Block and receipt.fused == receipt.unfused == ()
