"""Trial: what `compare` measures of one norm at one placement; each is a task of its own."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normkit.lab.register import find_norm, find_placement
from normkit.lab.setups.text import VOCABULARY, fixed_windows, text, windows
from normkit.lab.setups.training import diverged, train
from normkit.placement import Placement
from normkit.residual import Attention, FeedForward, Residual, ResidualStack
from normkit.residual.init import initialize_branch

KNOWS_NOTHING = math.log(VOCABULARY)
"""The loss of equal odds for every character; what diverges counts as this."""
LENGTH = 32
CHECK_SECONDS = 120.0
"""A norm that has not come back from a few small inputs by then would hold up the comparison for ever."""


@cache
def knows_frequencies() -> float:
    """The held-out loss of a model that knows how often each character comes, and nothing of what precedes it."""
    characters = text()
    counts = torch.bincount(characters.train, minlength=VOCABULARY).double() + 1
    return -(counts / counts.sum()).log()[characters.validation].mean().item()


class TrialError(ValueError):
    """The norm does not behave as one; the message is for the user."""


class Decoder(nn.Module):
    """A small causal language model on characters, with any module as its norm."""

    def __init__(self, make: Callable[[int], nn.Module], placement: str | Placement, dim: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Parameter(torch.randn(LENGTH, dim) * 0.02)
        nn.init.normal_(self.embed.weight, std=0.02)
        branches = []
        for layer in range(1, depth + 1):
            common: dict[str, Any] = {"norm": make, "depth": depth, "layer": layer}
            attention = Attention(dim, 4)
            branches.append(Residual(attention, placement, dim, kind="attention", **common))
            branches.append(
                Residual(FeedForward(dim, 4 * dim, gated=False, act="gelu"), placement, dim, kind="ffn", **common)
            )
        for branch in branches:
            initialize_branch(branch)
        ends = branches[-1].placement.final_norm
        self.stack = ResidualStack(branches, make(dim) if ends else None)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.stack(x, causal=True))


def check(*, seed: int, norm: str, placement: str, dim: int) -> dict[str, Any]:
    """Whether it can be built, keeps the shape, and gives finite outputs and gradients.

    Raises:
        CandidateError, TrialError: one line that says what is wrong.
    """
    with _at_most(CHECK_SECONDS):
        return _checked(norm, placement, dim)


def _checked(norm: str, placement: str, dim: int) -> dict[str, Any]:
    wiring = find_placement(placement)
    module = find_norm(norm)(dim)
    if not isinstance(module, nn.Module):
        raise TrialError(f"{norm} made a {type(module).__name__} of {dim} features; it must be a torch.nn.Module")
    x = torch.randn(4, LENGTH, dim, requires_grad=True)
    y = module(x)
    if not isinstance(y, Tensor):
        raise TrialError(f"its output is a {type(y).__name__}, not a tensor")
    if y.shape != x.shape:
        raise TrialError(f"its output has shape {tuple(y.shape)}; the input has {tuple(x.shape)}")
    if y.dtype != x.dtype:
        raise TrialError(f"its output is {y.dtype}; the input is {x.dtype}")
    if not y.isfinite().all():
        raise TrialError("its output of standard normal numbers is not finite")
    if y.requires_grad:
        y.square().sum().backward()
    if x.grad is None:
        raise TrialError("its output has no gradient with respect to the input")
    for name, tensor in (("input", x), *module.named_parameters()):
        if tensor.grad is not None and not tensor.grad.isfinite().all():
            raise TrialError(f"the gradient of its {name} is not finite")
    Decoder(find_norm(norm), wiring, dim, 1)(torch.zeros(1, 2, dtype=torch.long))
    return {"parameters": sum(p.numel() for p in module.parameters())}


@contextmanager
def _at_most(seconds: float) -> Generator[None]:
    """Raise `TrialError` in what takes longer, where the system can interrupt this thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: object) -> None:
        raise TrialError(f"it takes more than {seconds:g} s for a few small inputs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def training(
    *, seed: int, norm: str, placement: str, dim: int, depth: int, batch: int, rate: float, steps: int
) -> dict[str, Any]:
    """Train on Python's own source, and the loss on held-out text in nats a character."""
    model = Decoder(find_norm(norm), find_placement(placement), dim, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    characters = text()

    def loss() -> Tensor:
        tokens, targets = windows(characters.train, batch, LENGTH)
        return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    losses = train((loss for _ in range(steps)), optimizer)
    if diverged(losses):
        return {"loss": KNOWS_NOTHING, "diverged": True, "steps": len(losses)}
    model.eval()
    with torch.no_grad():
        tokens, targets = fixed_windows(characters.validation, 64, LENGTH)
        final = cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
    lost = not math.isfinite(final)
    return {"loss": KNOWS_NOTHING if lost else min(final, KNOWS_NOTHING), "diverged": lost, "steps": steps}


def speed(*, seed: int, norm: str, placement: str, tokens: int, dim: int, rounds: int) -> dict[str, Any]:
    """Time of the norm, forward and backward, over that of `torch.nn.LayerNorm` in the same rounds: the median."""
    find_placement(placement)
    x = torch.randn(1, tokens, dim, requires_grad=True)
    upstream = torch.randn(1, tokens, dim)
    ratios: dict[str, list[float]] = {"forward": [], "forward and backward": []}
    modules = find_norm(norm)(dim), nn.LayerNorm(dim)

    def forward(module: nn.Module) -> None:
        with torch.no_grad():
            module(x)

    def both(module: nn.Module) -> None:
        torch.autograd.grad(module(x), x, upstream)

    for name, call in (("forward", forward), ("forward and backward", both)):
        for module in modules:
            call(module)
        for _ in range(rounds):
            own, layer = (_seconds(call, module) for module in modules)
            ratios[name].append(own / layer)
    return {name: sorted(found)[len(found) // 2] for name, found in ratios.items()}


def _seconds(call: Callable[[nn.Module], None], module: nn.Module) -> float:
    start = time.thread_time()  # of the processor: other work on the machine does not count
    for _ in range(5):
        call(module)
    return time.thread_time() - start
