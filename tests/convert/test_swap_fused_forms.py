"""In which ways a block may write a sum and the norm behind it, for swap(fuse_residual=True) to fuse them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.convert.swap import fuse as fuse_module
from normkit.convert.swap import swap
from normkit.convert.swap.rewrite import Unreadable, rewrite
from tests.convert.check import trained
from tests.convert.fused import (
    QUICK,
    Block,
    Post,
    fused_calls,
    same_bits,
    stack,
)


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    import functools

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any) -> Any:
        return function(self, *args) * 2

    return wrapper


def closed(shift: float) -> Callable[[], nn.Module]:
    class Hard(Post):
        """A decorator, a closure, private names, super, defaults."""

        __scale = 0.5

        @twice
        def forward(self, x: Tensor, *, more: float = 0.25) -> Tensor:
            self.__seen = x.shape
            total = super().forward(x) + x
            kept = total
            return self.norm(kept) * self.__scale + shift + more

    return Hard


class OnData(Post):
    """Another path for other numbers: each is fused, none is taken for the other."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        if x.sum() > 0:
            total = total * 2
            total = total + x
            kept = total
            return self.norm(total) - kept
        return self.norm(total)


class Shared(Post):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        x = x + self.norm(x)
        return self.norm(x)


class WrittenLater(Post):
    """The sum is changed in place once it was normalized."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        y = self.norm(total).clone()
        with torch.no_grad():
            kept = total.clone()
            total.mul_(2)
        return y + (total - kept).detach()


@pytest.mark.parametrize(
    ("block", "blocks"),
    [(Post, 2), (closed(0.75), 2), (OnData, 1), (Shared, 2)],
    ids=["post", "hard", "data", "shared"],
)
def test_ways_to_write_it(block: Callable[[], nn.Module], blocks: int) -> None:
    model, x = stack(block)
    plain = copy.deepcopy(model)
    swap(plain, x, only_faster=False, rounds=0)
    receipt = swap(model, x, **QUICK)
    assert len(receipt.fused) == blocks, receipt.unfused
    for sign in (1, -1):
        inputs = [(x * sign + sign).clone().requires_grad_() for _ in range(2)]
        if sign > 0 or block is not OnData:
            assert fused_calls(lambda i=inputs: model(i[0])) >= 1  # type: ignore[misc]
        ys = [m(i) for m, i in zip((model, plain), inputs, strict=True)]
        assert torch.equal(*ys)
        grads = [
            torch.autograd.grad(y.sum(), [i, *m.parameters()])
            for y, i, m in zip(ys, inputs, (model, plain), strict=True)
        ]
        same_bits(*grads)


class Alpha(Post):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.add(x, self.mix(x), alpha=2)
        return self.norm(total)


class InPlace(Post):
    def forward(self, x: Tensor) -> Tensor:
        total = self.mix(x)
        total += x
        return self.norm(total)


class WrittenBetween(Post):
    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        total.mul_(2)
        return self.norm(total)


class Broadcast(Post):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mix(x)[:, :1])


class Own(Post):
    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        return self.norm(locals()["total"]) if "y" in locals() else self.norm(total)


class Other(Post):
    """What is normalized is another tensor by then."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        total = x
        return self.norm(total)


class Two(Post):
    """Something happens before the norm."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        return self.mix(x) + self.norm(total)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Alpha, "does not call it on a sum"),
        (InPlace, "does not call it on a sum"),
        (WrittenBetween, "does not call it on a sum"),
        (Other, "does not call it on a sum"),
        (Two, "does not call it on a sum"),
        (Broadcast, "one shape"),
        (Own, "locals"),
    ],
)
def test_what_is_left_and_why(block: Callable[[], nn.Module], reason: str) -> None:
    model, x = stack(block)
    plain = copy.deepcopy(model)
    swap(plain, x, only_faster=False, rounds=0)
    receipt = swap(model, x, **QUICK)
    assert len(receipt.swapped) == 2 and receipt.fused == ()
    assert len(receipt.unfused) == 2 and all(reason in r for _, r in receipt.unfused), receipt.unfused
    assert type(model[0]) is block and torch.equal(model(x), plain(x))


def test_source_that_is_not_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import linecache

    model, x = stack(Block)
    lines = [line.replace("+ self.mix", "- self.mix") for line in linecache.getlines(__file__)]
    monkeypatch.setattr("inspect.findsource", lambda _: (lines, 0))
    monkeypatch.setattr(fuse_module, "_CLASSES", {})
    from normkit.convert.swap import rewrite as rewrite_module

    rewrite_module._compiled.cache_clear()
    receipt = swap(model, x, **QUICK)
    assert receipt.fused == () and "not what runs" in receipt.unfused[0].reason


def test_rewrite_wants_a_function() -> None:
    with pytest.raises(Unreadable, match="no plain function"):
        rewrite(len, {"norm"}, lambda *_: None)


def test_a_sum_that_is_written_into_later() -> None:
    model, x = stack(WrittenLater)
    plain = copy.deepcopy(model)
    receipt = swap(model, x, gradients=False, **QUICK)
    assert len(receipt.fused) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


class Maybe(Post):
    """Something may happen between sum and norm, as cross attention does in a decoder."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        total = x + self.mix(x)
        if extra is not None:
            total = total + extra
        kept = total
        total = self.norm(total)
        return total + kept


def test_what_may_stand_between() -> None:
    torch.manual_seed(0)
    model, x = trained(Maybe()).eval(), torch.randn(3, 24)
    plain = copy.deepcopy(model)
    swap(plain, x, only_faster=False, rounds=0)
    assert len(swap(model, x, **QUICK).fused) == 1
    assert fused_calls(lambda: model(x)) == 1 and torch.equal(model(x), plain(x))
    extra = torch.randn(3, 24)
    assert fused_calls(lambda: model(x, extra)) == 0 and torch.equal(model(x, extra), plain(x, extra))


class Handles(Post):
    """The handler finds the sum where the norm raised."""

    def forward(self, x: Tensor) -> Tensor:
        total = x
        try:
            if x is not None:
                total = x + self.mix(x)
                return self.norm(total)
        except RuntimeError:
            pass
        return total


def test_a_handler_finds_the_same_state() -> None:
    torch.manual_seed(0)
    model, x = Handles().eval(), torch.randn(3, 24)
    assert swap(model, x, **QUICK).fused == ()
    model.norm.register_forward_pre_hook(lambda *_: torch._check(False, lambda: "no"))
    assert torch.equal(model(x), x + model.mix(x))
