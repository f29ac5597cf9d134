"""The residual stream between branches: what is pending, how it is added, and which norms add it themselves."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn


class Stream(NamedTuple):
    """The residual stream between two branches."""

    x: Tensor
    """The stream, without ``pending``."""
    pending: Tensor | None = None
    """The last branch's output, not added yet: the next norm adds it in the same pass."""
    second: Tensor | None = None
    """The unnormalized sum that ResiDual keeps beside the stream."""

    def settle(self) -> Tensor:
        """The stream with everything added, in the stream's dtype."""
        return self.x if self.pending is None else add(self.x, self.pending)


def add(x: Tensor, branch: Tensor) -> Tensor:
    """``x + branch``, rounded to x's dtype."""
    return (x + branch).to(x.dtype)


class FusingModule(nn.Module):
    """A module that knows of each of its norms whether it takes the addition, also after one was replaced."""

    def __init__(self, fuse: bool) -> None:
        super().__init__()
        self.fuse = fuse
        self._takes_residual: dict[str, bool] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.endswith("_norm"):
            self._takes_residual[name] = takes_residual(value)

    def fuses(self, name: str) -> bool:
        """Whether add and norm are one call for the norm of that name."""
        return self.fuse and self._takes_residual[name]


def add_norm(norm: nn.Module, branch: Tensor, stream: Tensor, *, fuse: bool) -> tuple[Tensor, Tensor]:
    """(norm of the sum in the branch's dtype, the sum in the stream's dtype), in one call if ``fuse``."""
    if fuse:
        return norm(branch, residual=stream)
    total = add(stream, branch)
    y = norm(total)
    return (y.to(branch.dtype) if y.dtype == total.dtype else y), total


def takes_residual(norm: object) -> bool:
    """Whether a norm has the addition built in (``residual=``)."""
    if not isinstance(norm, nn.Module) or getattr(norm, "running_mean", None) is not None:
        return False
    return "residual" in inspect.signature(norm.forward).parameters


def finish(stream: Stream, final_norm: nn.Module | None, *, fuse: bool) -> Tensor:
    """The end of a stack: the last addition and the final norm; ResiDual adds the norm of its second stream instead.

    ``N(x + pending)``, or with a second stream ``x + N(second)``.
    """
    if stream.second is not None:
        if final_norm is None:
            raise ValueError("a second stream ends in a norm that is added to the first: give final_norm")
        return add(stream.settle(), final_norm(stream.second))
    if final_norm is None:
        return stream.settle()
    if stream.pending is None:
        return final_norm(stream.x)
    return add_norm(final_norm, stream.pending, stream.x, fuse=fuse)[0]
