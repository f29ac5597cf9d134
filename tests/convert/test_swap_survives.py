"""What happens to a model after a swap: copied, saved, compiled, sharded, adapted, cast, transformed."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normkit.convert.swap import swap, unswap
from normkit.convert.swap.reclass import plan_of
from normkit.ops import called
from tests.convert.nets import IMAGE_NORMS, TEXT_NORMS, Llama, image, text
from tests.convert.test_swap import QUICK, TOLERANCE, close, outputs_of

ROOT = Path(__file__).parent.parent.parent


def swapped_names(model: nn.Module) -> set[str]:
    return {n.rpartition(".")[2] for n, m in model.named_modules() if plan_of(m) is not None}


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "pickle protocol 0": lambda m: pickle.loads(pickle.dumps(m, 0)),
    "torch.save": saved,
    "deepcopy of a pickle": lambda m: copy.deepcopy(pickle.loads(pickle.dumps(m))),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(("build", "norms"), [(text, TEXT_NORMS), (image, IMAGE_NORMS)], ids=["text", "image"])
def test_copies_are_swapped_too_and_stand_alone(
    way: str, build: Callable[..., tuple[nn.Module, Tensor]], norms: set[str]
) -> None:
    model, x = build()
    receipt = swap(model, x, **QUICK)
    expected = outputs_of(model, x)
    twin = COPIES[way](model)
    assert swapped_names(twin) == norms
    assert all(torch.equal(a, b) for a, b in zip(outputs_of(twin, x), expected, strict=True))
    receipt.undo()
    if way != "copy":  # which shares its parts
        assert swapped_names(twin) == norms
        assert unswap(twin) == len(norms)
    assert [type(m) for m in twin.modules()] == [type(m) for m in build()[0].modules()]


LOAD = """
import sys, torch
model, x, expected = torch.load(sys.argv[1], weights_only=False)
from normkit.convert.swap import unswap
assert torch.allclose(model(x)["hidden"], expected, rtol=1e-6, atol=1e-6)
print(unswap(model))
"""


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "no kernels"])
def test_another_process_loads_it(native: bool, tmp_path: Path) -> None:
    model, x = text()
    swap(model, x, **QUICK)
    with torch.no_grad():
        torch.save((model, x, model(x)["hidden"]), tmp_path / "model.pt")
    env = {**os.environ, "NORMKIT_NO_NATIVE": "" if native else "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "model.pt")], env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(len(TEXT_NORMS)), done.stderr


def test_the_state_dict_is_the_same_both_ways() -> None:
    model, x = text()
    before = model.state_dict()
    swap(model, x, **QUICK)
    after = model.state_dict()
    assert list(after) == list(before)
    plain, _ = text()
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    plain.load_state_dict(after)
    model.load_state_dict(plain.state_dict(), assign=True)
    close(outputs_of(model, x), outputs_of(plain, x), TOLERANCE[torch.float32])


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("first", ["swap", "compile"])
@pytest.mark.parametrize("build", [text, image], ids=["text", "image"])
def test_compiled(build: Callable[..., tuple[nn.Module, Tensor]], first: str, training: bool) -> None:
    plain, x = build()
    model, _ = build()
    plain.train(training), model.train(training)
    if training and build is image:  # torch's own forward divides by a count, which cannot be traced
        plain.cumulative.momentum = model.cumulative.momentum = 0.3
    expected = outputs_of(plain, x)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    if first == "compile":
        outputs_of(compiled, x)
        receipt = swap(compiled, x, **QUICK)
    else:
        receipt = swap(model, x, **QUICK)
    assert len(receipt.swapped) >= 6
    graphs: list[str] = []
    got = outputs_of(compiled, x)
    close(got, expected, TOLERANCE[torch.float32])
    torch.compiler.reset()

    def see(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph.code)
        return graph.forward

    seen = torch.compile(model, fullgraph=True, backend=see)
    state = copy.deepcopy(model.state_dict())  # a training step moves running statistics
    with torch.no_grad():
        seen(x)
    model.load_state_dict(state)
    assert "torch.ops.normkit" in graphs[0]
    receipt.undo()
    torch.compiler.reset()
    close(outputs_of(torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected, 1e-6)


def test_a_cumulative_mean_compiles_once_swapped() -> None:
    plain, x = image()
    model, _ = image()
    plain.train(), model.train()
    swap(model, x, **QUICK)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(outputs_of(compiled, x), outputs_of(plain, x), TOLERANCE[torch.float32])


def test_swapping_after_compilation_takes_effect_at_once() -> None:
    """The compiled graph must not go on with the old forward."""
    model = nn.Sequential(Llama(8))
    x = torch.randn(4, 8)
    graphs: list[str] = []

    def see(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=see)
    with torch.no_grad():
        compiled(x)
        receipt = swap(model, x, **QUICK)
        compiled(x)
        receipt.undo()
        compiled(x)
    assert ["normkit" in g for g in graphs][:2] == [False, True]
    assert len(graphs) in (2, 3)


def test_exported() -> None:
    model, x = text()
    swap(model, x, **QUICK)
    program = torch.export.export(model, (x,))
    assert "normkit" in program.graph_module.code
    with torch.no_grad():
        assert torch.allclose(program.module()(x)["hidden"], model(x)["hidden"], atol=1e-6)


@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [text, image], ids=["text", "image"])
def test_autocast(build: Callable[..., tuple[nn.Module, Tensor]], width: torch.dtype) -> None:
    plain, x = build()
    model, _ = build()
    swap(model, x, **QUICK)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = plain(x.to(width)), model(x.to(width))
    expected, got = ([t] if isinstance(t, Tensor) else list(t.values()) for t in (expected, got))
    close(got, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("build", [text, image], ids=["text", "image"])
def test_transforms_see_the_own_forward(build: Callable[..., tuple[nn.Module, Tensor]]) -> None:
    model, x = build()
    swap(model, x, **QUICK)
    plain, _ = build()

    def run(net: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda t: (y["hidden"] if isinstance(y := net(t), dict) else y).sum()

    for transform in (torch.func.grad, lambda f: lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]):
        close([transform(run(model))(x)], [transform(run(plain))(x)], 1e-5)


def test_double_backward() -> None:
    plain, x = text(torch.float64)
    model, _ = text(torch.float64)
    swap(model, x, **QUICK)
    found = []
    for net in (model, plain):
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(net(leaf)["hidden"].square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), leaf)[0])
    close(found[:1], found[1:], 1e-5)  # norms that compute in float32 whatever comes, differentiated twice


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_as_before(reentrant: bool) -> None:
    plain, x = image()
    model, _ = image()
    swap(model, x, **QUICK)
    for net in (model, plain):
        checkpoint(net.train(), x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
    assert int(model.batch.num_batches_tracked) == int(plain.batch.num_batches_tracked)
    close([*model.buffers()], [*plain.buffers()], 1e-5)
    close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 1e-5)  # type: ignore[misc]


def test_training_goes_the_same_way() -> None:
    plain, x = image()
    model, _ = image()
    swap(model, x, **QUICK)
    losses = []
    for net in (model, plain):
        optimizer = torch.optim.SGD(net.train().parameters(), 0.05)
        for _ in range(10):
            loss = (net(x) - x.mean()).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    close(losses[:1], losses[1:], 1e-4)
    close([*model.buffers()], [*plain.buffers()], 1e-3)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_generation_with_a_cache() -> None:
    model, ids = tiny_llama(), torch.arange(5, 17).view(2, 6)
    plain = copy.deepcopy(model)
    swap(model, input_ids=ids, use_cache=False, **QUICK)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    tokens, operators = called(model.generate, ids, **options)
    assert operators == {"rms_norm"}
    assert torch.equal(tokens, plain.generate(ids, **options))


def test_a_cache_among_the_example_arguments_is_not_written() -> None:
    from transformers import DynamicCache

    model, ids = tiny_llama(), torch.arange(5, 17).view(2, 6)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    assert swap(model, input_ids=ids[:, :1], past_key_values=cache, use_cache=True, **QUICK).swapped
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("first", ["swap", "lora"])
def test_lora(first: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"], init_lora_weights=False
    )
    ids = torch.arange(5, 17).view(2, 6)
    model, plain = tiny_llama(), tiny_llama()
    if first == "swap":
        assert len(swap(model, input_ids=ids, use_cache=False, **QUICK).swapped) == 5
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    reference = peft.get_peft_model(plain, config)
    if first == "lora":
        assert len(swap(adapted, input_ids=ids, use_cache=False, **QUICK).swapped) == 5
    assert len([m for m in adapted.modules() if plan_of(m) is not None]) >= 5
    found = []
    for net in (adapted, reference):
        net.train()
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)])
    assert len(found[0]) > 4
    close(found[0], found[1], 1e-5)
    merged, expected = adapted.merge_and_unload(), reference.merge_and_unload()
    with torch.no_grad():
        close([merged(input_ids=ids).logits], [expected(input_ids=ids).logits], 1e-5)


@pytest.mark.parametrize(
    "case",
    ["ddp", "fsdp after", *(pytest.param(c, marks=pytest.mark.slow) for c in ("fsdp before", "fsdp of the norm"))],
)
def test_distributed(case: str, tmp_path: Path) -> None:
    """Two processes, in a program of their own: a process group outlives a test."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "convert" / "distributed.py"), case, str(tmp_path / "store")],
        env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.stdout.split() == ["fine", "fine"], done.stdout + done.stderr[-3000:]
