"""What the tests of conversions share: snapshots, comparisons, trained-like values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from normkit.convert import Receipt
from normkit.convert.fold.proof import Widened


def trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter and statistic away from its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                noise = torch.rand(buffer.shape, generator=generator).to(buffer.dtype)
                buffer.copy_(noise + 0.5 if "var" in name else noise - 0.5)
    return model


def outputs(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The floating point tensors that a model returns."""
    with torch.no_grad():
        return [t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]


def in_float64(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The same of a model in float64, with norms that do not narrow."""
    args, kwargs = wide((args, kwargs))
    with Widened():
        return outputs(model, *args, **kwargs)


def wide(structure: Any) -> Any:
    """Floating point tensors in float64."""
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, structure)


def check_exact(convert: Callable[..., Receipt], model: nn.Module, *args: Any, **kwargs: Any) -> Receipt:
    """Convert a float64 copy and a float32 one: the outputs agree to 1e-12 and 1e-5; undo restores every bit.

    Returns:
        The float64 model's receipt, with the conversion made.
    """
    narrow = copy.deepcopy(model).float()
    before = outputs(narrow, *args, **kwargs)
    snapshot = Snapshot(narrow)
    receipt = convert(narrow, *args, **kwargs)
    assert apart(outputs(narrow, *args, **kwargs), before) < 1e-5
    receipt.undo()
    snapshot.assert_same()
    assert apart(outputs(narrow, *args, **kwargs), before) == 0
    model.double()
    args, kwargs = wide((args, kwargs))
    before = in_float64(model, *args, **kwargs)
    receipt = convert(model, *args, **kwargs)
    assert apart(in_float64(model, *args, **kwargs), before) < 1e-12
    return receipt


def apart(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest deviation over the largest value."""
    assert len(got) == len(expected) > 0
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(got, expected, strict=True)
    )


class Snapshot:
    """Every tensor of a model (the object and its bits), its modules, modes and hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [(name, id(m), m.training) for name, m in model.named_modules(remove_duplicate=False)]
        self.tensors = self._tensors()
        self.bits = [t.detach().clone() for _, t in self.tensors]

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]

    def assert_same(self) -> None:
        """The model is as it was, bit for bit."""
        assert [(n, id(m), m.training) for n, m in self.model.named_modules(remove_duplicate=False)] == self.modules
        now = self._tensors()
        assert [(n, id(t)) for n, t in now] == [(n, id(t)) for n, t in self.tensors]
        for (name, tensor), bits in zip(now, self.bits, strict=True):
            assert torch.equal(tensor.nan_to_num(), bits.nan_to_num()), name
