"""Real models, each with one fault put into it: rule id to a function that audits such a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normkit
from normkit.audit import Audit, audit
from tests.zoo import ZOO, Entry, build

Plant = Callable[[Path], Audit]
PLANTS: dict[str, Plant] = {}


def plant(rule: str) -> Callable[[Plant], Plant]:
    """Register the model that has this rule's fault."""

    def register(function: Plant) -> Plant:
        PLANTS[rule] = function
        return function

    return register


class HalfRMS(nn.Module):
    """An RMSNorm that never leaves its input's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.detach().clone()), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OffsetInInputDtype(nn.Module):
    """Gemma's norm with 1 + w formed in the weight's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        z = x.float()
        return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight).float()).to(x.dtype)


class Around(nn.Module):
    """A module with something done to its input first."""

    def __init__(self, inner: nn.Module, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.before = inner, before

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(self.before(x), *args, **kwargs)


class OverAllHeads(nn.Module):
    """A norm over all heads together where one per head is expected."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(-2)).view_as(x)


def norms(entry: Entry) -> list[str]:
    """Names of the labelled norms."""
    return [name for _, name, _ in entry.labels]


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in another's place."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def run(entry: Entry, **options: Any) -> Audit:
    """Audit a model on its own inputs."""
    return audit(entry.model, **options, **entry.inputs)


def larger(name: str, **changes: Any) -> Entry:
    """An architecture with some of its config changed."""
    before = ZOO[name]
    ZOO[name] = before | {"config": before["config"] | changes, "norms": [], "functional": []}
    try:
        return build(name)
    finally:
        ZOO[name] = before


def _half_llama(eps: float) -> Audit:
    entry = build("llama")
    for name in norms(entry):
        replace(entry.model, name, HalfRMS(entry.model.get_submodule(name).weight, eps))
    entry.model.half()
    return run(entry)


@plant("statistic-overflow")
def _(_: Path) -> Audit:
    return _half_llama(1e-3)


@plant("statistic-underflow")
def _(_: Path) -> Audit:
    return _half_llama(0.0)


@plant("eps-vanishes")
def _(_: Path) -> Audit:
    return _half_llama(1e-9)


@plant("eps-dominates")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("llama")
    entry.model.get_input_embeddings().weight.mul_(1e-3)
    return run(entry)


@plant("gain-in-half-precision")
def _(_: Path) -> Audit:
    entry = build("gemma")
    for name in norms(entry):
        replace(entry.model, name, OffsetInInputDtype(entry.model.get_submodule(name).weight))
    entry.model.bfloat16()
    return run(entry)


@plant("cast-order")
def _(_: Path) -> Audit:
    entry = build("llama")
    for name in norms(entry):
        replace(entry.model, name, nn.RMSNorm(32, eps=1e-6))
    return run(entry)


@plant("mixed-dtypes")
def _(_: Path) -> Audit:
    entry = build("llama")
    entry.model.bfloat16()
    for name in norms(entry):
        replace(entry.model, name, normkit.nn.RMSNorm(32, eps=1e-6))
    return run(entry)


@plant("gain-offset")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("gemma")
    for name in norms(entry):
        entry.model.get_submodule(name).weight.add_(1)  # a converter baked the 1 in
    return run(entry)


@plant("eps-mismatch")
def _(_: Path) -> Audit:
    entry = build("llama")
    for name in norms(entry):
        entry.model.get_submodule(name).variance_epsilon = 1e-5
    return run(entry)


@plant("nonfinite-weights")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("bert")
    entry.model.get_submodule(norms(entry)[1]).weight[3] = float("nan")
    return run(entry)


@plant("uninitialised-weights")
def _(folder: Path) -> Audit:
    from safetensors.torch import load_file, save_file

    from normkit.audit.load import load

    build("bert").model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {key.replace("output.LayerNorm", "output.norm"): value for key, value in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    loaded = load(str(folder))
    return audit(loaded.model, loading=loaded.report, **loaded.kwargs)


@plant("zero-gain")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("gpt2")
    entry.model.get_submodule("transformer.h.0.ln_1").weight.zero_()
    return run(entry)


@plant("unexpected-bias")
def _(_: Path) -> Audit:
    entry = build("cohere")
    for name in norms(entry):
        replace(entry.model, name, nn.LayerNorm(32, eps=1e-5))
    return run(entry)


@plant("norm-never-ran")
def _(_: Path) -> Audit:
    entry = build("llama")
    entry.model.config.num_hidden_layers = 1  # the forward runs so many layers
    return run(entry)


@plant("missing-final-norm")
def _(_: Path) -> Audit:
    entry = build("llama")
    entry.model.model.norm = nn.Identity()
    return run(entry)


@plant("double-final-norm")
def _(_: Path) -> Audit:
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True).eval()
    return audit(model, torch.randn(2, 5, 16), torch.randn(2, 4, 16))


@plant("misleading-name")
def _(_: Path) -> Audit:
    return run(build("llama"))


@plant("deep-post-norm")
def _(_: Path) -> Audit:
    entry = larger("bert", num_hidden_layers=6)
    optimizer = torch.optim.AdamW(normkit.param_groups(entry.model, weight_decay=0.1), lr=1e-3)
    return run(entry, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000))


@plant("mixed-placement")
def _(_: Path) -> Audit:
    entry = build("opt")
    entry.model.model.decoder.layers[1].do_layer_norm_before = False
    return run(entry)


@plant("qk-norm-axis")
def _(_: Path) -> Audit:
    entry = build("qwen3")
    attention = entry.model.model.layers[0].self_attn
    keys = attention.k_proj.out_features
    attention.k_norm = OverAllHeads(keys)
    return run(entry)


def _batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


@plant("batch-statistics-at-inference")
def _(_: Path) -> Audit:
    entry = build("resnet")
    _batch_norms(entry.model)[2].train()
    return run(entry)


@plant("training-mode")
def _(_: Path) -> Audit:
    entry = build("resnet")
    entry.model.train()
    return run(entry)


@plant("small-batch")
def _(_: Path) -> Audit:
    entry = build("resnet")
    entry.model.train()
    return run(entry)


@plant("single-element-statistic")
def _(_: Path) -> Audit:
    entry = build("resnet")
    for name, module in list(entry.model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):  # the last stage is 1 x 1
            replace(entry.model, name, nn.GroupNorm(module.num_features, module.num_features))
    return run(entry)


@plant("padding-in-statistics")
def _(_: Path) -> Audit:
    entry = build("wav2vec2_group")
    mask = torch.ones(entry.inputs["input_values"].shape, dtype=torch.int64)
    return run(entry, attention_mask=mask)


@plant("batch-mates")
def _(_: Path) -> Audit:
    entry = build("resnet")
    for module in _batch_norms(entry.model):
        module.running_mean = module.running_var = None
    return run(entry)


@plant("running-statistics-untouched")
def _(_: Path) -> Audit:
    entry = build("resnet")
    for module in _batch_norms(entry.model):
        module.reset_running_stats()
    return run(entry)


@plant("running-statistics-poisoned")
def _(_: Path) -> Audit:
    entry = build("resnet")
    entry.model.train()
    entry.model(entry.inputs["pixel_values"].index_fill(3, torch.tensor([4]), float("nan")))
    entry.model.eval()
    return run(entry)


@plant("running-statistics-stale")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("resnet")
    images = entry.inputs["pixel_values"]
    entry.model.train()
    for _ in range(60):
        entry.model(images)
    entry.model.eval()
    return run(entry, data=[{"pixel_values": images * 255}])


@plant("decay-on-gains")
def _(_: Path) -> Audit:
    entry = build("bert")
    return run(entry, optimizer=torch.optim.AdamW(entry.model.parameters(), lr=1e-3, weight_decay=0.1))


@plant("frozen-gains")
def _(_: Path) -> Audit:
    entry = build("gpt2")
    for name, parameter in entry.model.named_parameters():
        parameter.requires_grad_("ln_1" not in name)
    return run(entry)


@plant("unsynchronized-batch-norm")
def _(_: Path) -> Audit:
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    entry = build("resnet")
    entry.model.train()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return audit(nn.parallel.DistributedDataParallel(entry.model), **entry.inputs)
    finally:
        distributed.destroy_process_group()


@plant("checkpointed-batch-norm")
def _(_: Path) -> Audit:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    entry = build("resnet")
    entry.model.train()
    stages = entry.model.get_submodule("resnet.encoder" if hasattr(entry.model, "resnet") else "encoder").stages
    stages[1] = checkpoint_wrapper(stages[1])
    return run(entry)


@plant("slow-norm")
def _(_: Path) -> Audit:
    return run(build("llama"), select=["slow-norm"])


@plant("nonfinite-activations")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("bert")
    entry.model.get_input_embeddings().weight[int(entry.inputs["input_ids"][0, 3])] = float("inf")
    return run(entry)


def _on_data(entry: Entry) -> Audit:
    return run(entry, data=[entry.inputs])


@torch.no_grad()
def _scaled(entry: Entry, pattern: str, factor: float) -> Entry:
    found = [p for name, p in entry.model.named_parameters() if pattern in name]
    assert found
    for parameter in found:
        parameter.mul_(factor)
    return entry


@plant("stream-growth")
def _(_: Path) -> Audit:
    return _on_data(_scaled(build("gpt2"), "mlp.c_proj", 1e4))


@plant("weak-branch")
def _(_: Path) -> Audit:
    return _on_data(_scaled(build("gpt2"), "mlp.c_proj", 1e-4))


@plant("dead-gains")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("llama")
    entry.model.model.norm.weight[3] = 1e-4
    return _on_data(entry)


@plant("outlier-gains")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("llama")
    entry.model.model.norm.weight[3] = 40.0
    return _on_data(entry)


@plant("activation-outliers")
@torch.no_grad()
def _(_: Path) -> Audit:
    entry = build("llama")
    entry.model.get_input_embeddings().weight[:, 5] *= 1000
    return _on_data(entry)


@plant("large-attention-logits")
def _(_: Path) -> Audit:
    return _on_data(_scaled(build("gpt2"), "attn.c_attn.weight", 100.0))


@plant("gradient-imbalance")
def _(_: Path) -> Audit:
    entry = larger("gpt2", n_layer=8)
    blocks = entry.model.transformer.h
    for index in range(len(blocks)):
        blocks[index] = Around(blocks[index], lambda x: 4 * x)
    return _on_data(entry)
