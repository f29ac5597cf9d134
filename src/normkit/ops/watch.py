"""Asking whether a kernel really computes something: run it and see which operators it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

_NAMESPACE = "normkit"


class _Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and func.namespace == _NAMESPACE:
            self.seen.add(func._schema.name.removeprefix(f"{_NAMESPACE}::"))
        return func(*args, **(kwargs or {}))


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, frozenset[str]]:
    """A function's result, and the names of the native operators that it called (not those of a later backward).

    `operator` says whether there is one for a spec; what it does with certain tensors, only a call can tell.
    """
    with _Watch() as watch:
        result = function(*args, **kwargs)
    return result, frozenset(watch.seen)
