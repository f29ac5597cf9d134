"""swap on modules that were not written with it in mind: left with a reason, never wrong."""

from __future__ import annotations

import copy
import io
from abc import ABC
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.convert import ConversionError
from normkit.convert.swap import swap
from tests.convert.nets import Llama

QUICK: dict[str, Any] = {"only_faster": False, "rounds": 0}


class Held(nn.Module):
    """An RMSNorm with one more tensor: its eps, a scale, or one that nobody reads."""

    def __init__(self, what: str, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.what = what
        value = torch.tensor(1e-6 if what == "eps" else 1.0)
        if how == "buffer":
            self.register_buffer("more", value)
        else:
            self.more = nn.Parameter(value) if how == "parameter" else value

    def forward(self, x: Tensor) -> Tensor:
        eps = self.more if self.what == "eps" else 1e-6
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight
        return y * self.more if self.what == "scale" else y


@pytest.mark.parametrize("how", ["buffer", "parameter", "attribute"])
@pytest.mark.parametrize("what", ["eps", "scale", "nothing"])
def test_numbers_in_tensors(what: str, how: str) -> None:
    """A probe takes an eps in a buffer for a constant; a checkpoint that is loaded after the swap holds another."""
    model, x = nn.Sequential(nn.Linear(8, 8), Held(what, how)), torch.randn(3, 8)
    original = copy.deepcopy(model)
    receipt = swap(model, x, **QUICK)
    assert receipt.swapped == (("1",) if what == "nothing" else ())
    for one in (model, original):
        with torch.no_grad():
            one[1].more.mul_(3)
    torch.testing.assert_close(model(x), original(x))


def test_classes_that_note_their_subclasses() -> None:
    """A registry must not come to hold the swapped class; ABC and Generic note nothing."""
    registry: dict[str, type] = {}

    class Registered(nn.LayerNorm):
        def __init_subclass__(cls, **how: Any) -> None:
            registry[cls.__name__] = cls

    class Once(type):
        def __new__(cls, name: str, bases: Any, members: Any) -> type:
            if name in registry:
                raise ValueError(f"{name} is there already")
            made = registry[name] = super().__new__(cls, name, bases, members)
            return made

    class Mine(Registered):
        pass

    class Other(nn.LayerNorm, metaclass=Once):
        pass

    class Abstract(nn.LayerNorm, ABC):
        pass

    model = nn.Sequential(Mine(8), Other(8), Abstract(8))
    receipt = swap(model, torch.randn(3, 8), **QUICK)
    assert receipt.swapped == ("2",)
    assert all("when a subclass of it is made" in reason for _, reason in receipt.skipped)
    assert registry == {"Mine": Mine, "Other": Other}


class Residual(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.lead, self.norm, self.branch, self.last = nn.Linear(16, 16), norm, nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lead(x)
        x += self.branch(self.norm(x))
        return self.last(x)


def test_in_place_sums_after_a_norm_that_copies() -> None:
    """In bfloat16 the norm keeps a float32 copy of x, a kernel x itself, and x is overwritten before the backward."""
    model, x = Residual(Llama(16)).bfloat16(), torch.randn(3, 16).bfloat16()
    model(x).sum().backward()
    receipt = swap(model, x, **QUICK)
    assert receipt.swapped == ("last",)
    assert [r.name for r in receipt.skipped] == ["norm"]
    assert "with it swapped the model raises" in receipt.skipped[0].reason
    model(x).sum().backward()
    receipt.undo()
    assert type(model.last) is nn.LayerNorm and type(model.norm) is Llama


def test_models_without_a_backward() -> None:
    """One line that says how to prove outputs alone."""
    model, x = Residual(nn.LayerNorm(16)), torch.randn(3, 16)  # F.layer_norm keeps x: the model has no backward at all
    with pytest.raises(ConversionError, match=r"could not be run to prove a swap on: .*gradients=False") as raised:
        swap(model, x, **QUICK)
    assert "\n" not in str(raised.value)
    assert swap(model, x, gradients=False, **QUICK).swapped == ("norm", "last")
    want = F.layer_norm(model.lead(x) + model.branch(F.layer_norm(model.lead(x), (16,))), (16,))
    with torch.no_grad():
        torch.testing.assert_close(model(x), want)


def test_traced_by_torch_jit() -> None:
    """A trace holds the module's own operators: those that autograd records of a kernel cannot be saved."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(), torch.randn(3, 8)
    swap(model, x, **QUICK)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, x), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x), model(x))


def test_a_default_dtype_of_float64() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(3, 8)
        assert swap(model, x, **QUICK).swapped == ("1",)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_norm_that_hands_its_input_on() -> None:
    """A call that runs no operator is none of the norm's, and the module's own forward serves it."""

    class Skipping(nn.LayerNorm):
        def forward(self, x: Tensor, skip: bool = False) -> Tensor:
            return x if skip else super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Skipping(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x) + 1, skip=True)

    model, x = Net(), torch.randn(3, 8)
    want = model(x)
    assert swap(model, x, **QUICK).swapped == ("norm",)
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("strict", [-1, "1e-4", True, float("nan")])
def test_strict_is_a_number(strict: Any) -> None:
    with pytest.raises(ValueError, match="strict must be None or a number >= 0; got"):
        swap(nn.LayerNorm(8), torch.randn(3, 8), strict=strict)
