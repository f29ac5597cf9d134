"""What the transcription tests share: trained-like parameters, and agreement of outputs and of every gradient."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def flat(result) -> list[Tensor]:
    """Every tensor of a (nested) result."""
    return [result] if isinstance(result, Tensor) else [t for part in result for t in flat(part)]


def trained(module: nn.Module, seed: int = 1, spread: float = 0.3) -> nn.Module:
    """The module with its parameters moved off their starting values, so that each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) * spread)
    return module


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values that do not depend on what ran before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(result, wanted: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of one fixed random combination of the outputs."""
    outputs = flat(result)
    weights = [randn(*t.shape, seed=100 + i) for i, t in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, wanted, weights, allow_unused=True, materialize_grads=True))


def assert_agree(module: nn.Module, inputs: Sequence[Tensor], transcription: Callable, **keywords) -> None:
    """In float64, the module and the loops give the same outputs and the same gradients of inputs and parameters."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    wanted = [*inputs, *module.parameters()]
    got, expected = module(*inputs, **keywords), transcription(*inputs)
    assert len(flat(got)) == len(flat(expected)) > 0
    for a, b in zip(flat(got), flat(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(gradients(got, wanted), gradients(expected, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
