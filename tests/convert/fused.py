"""Models whose residual sums a swap can fuse, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normkit.convert.swap import SwapReceipt
from normkit.convert.swap import fuse as fuse_module
from tests.convert.check import trained

QUICK: dict[str, Any] = {"only_faster": False, "rounds": 0, "fuse_residual": True}
IDS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Attention's place is taken by a linear layer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.mix, self.feed = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        return x + self.feed(self.second(x))


def stack(block: Callable[[], nn.Module], **how: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return trained(nn.Sequential(block(), block())).eval(), torch.randn(2, 7, 24, **how)


def hugging_face(family: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen2Config

    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 12}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    configs = {
        "llama": lambda: LlamaConfig(**shape, **special),
        "qwen2": lambda: Qwen2Config(**shape, **special),
        "gemma2": lambda: Gemma2Config(**shape, **special),
        "gpt2": lambda: GPT2Config(
            n_embd=48, n_layer=2, n_head=4, vocab_size=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **special
        ),
    }
    torch.manual_seed(0)
    return trained(AutoModelForCausalLM.from_config(configs[family]())).eval()


def fused_calls(call: Callable[[], Any]) -> int:
    """How many times a call reaches an operator that adds and normalizes."""
    count = 0
    original = fuse_module.fused

    def counting(*args: Any) -> Any:
        nonlocal count
        both = original(*args)
        count += both is not None
        return both

    fuse_module.fused = counting
    try:
        call()
    finally:
        fuse_module.fused = original
    return count


def whats(receipt: SwapReceipt) -> dict[str, str]:
    return {c.name: c.what.removeprefix("sum fused into ") for c in receipt.fused}


def reasons(receipt: SwapReceipt) -> dict[str, str]:
    return dict(receipt.unfused)


def step(model: nn.Module, **inputs: Any) -> list[Tensor]:
    logits = model(**inputs).logits
    seed = torch.linspace(-1, 1, logits.numel()).view(logits.shape).to(logits.dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [logits.detach(), *torch.autograd.grad(logits, parameters, seed, allow_unused=True)]


def same_bits(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


class Post(nn.Module):
    """The sum is made in the norm's call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mix(x) + x)
