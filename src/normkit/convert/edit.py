"""Editor: changes of one model that are logged and can be taken back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from normkit.convert.receipt import ConversionError

Edit = Callable[["Editor"], None]
"""One conversion step. It reads what it needs from the editor's model, so that it fits every copy of it."""


class Editor:
    """Changes a model by names, and remembers how to go back.

    Args:
        model: what to change, in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.touched: set[str] = set()
        """Names of parameters that were written, added or taken away."""
        self._log: list[tuple[Callable[[], str | None], Callable[[], None]]] = []

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer by its qualified name."""
        owner, key = self._owner(name)
        found = getattr(owner, key)
        assert isinstance(found, Tensor)
        return found.detach()

    def write(self, name: str, value: Tensor) -> None:
        """Give a parameter other values, rounded to its dtype; the parameter stays the same object."""
        owner, key = self._owner(name)
        held = getattr(owner, key)
        assert isinstance(held, Tensor)
        before = held.detach().clone()
        with torch.no_grad():
            held.copy_(value)
        self.touched.add(name)

        def blocked() -> str | None:
            return None if getattr(owner, key, None) is held else f"{name} is another tensor now"

        def back() -> None:
            with torch.no_grad():
                held.copy_(before)

        self._log.append((blocked, back))

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Register another parameter under a name, or one where none was."""
        owner, key = self._owner(name)
        before = owner._parameters[key]
        needs = before is None or before.requires_grad
        new = owner._parameters[key] = nn.Parameter(value.detach().clone(), requires_grad=needs)
        self.touched.add(name)

        def blocked() -> str | None:
            return None if owner._parameters.get(key) is new else f"{name} is another tensor now"

        def back() -> None:
            owner._parameters[key] = before

        self._log.append((blocked, back))

    def set_module(self, name: str, new: nn.Module) -> None:
        """Put a module in another's place, wherever the model holds it."""
        old = self.model.get_submodule(name)
        places = list(holders(self.model, old))
        if not places:
            raise ConversionError(f"{type(old).__name__} is the model itself: wrap it in a module to convert it")
        self.touched.update(f"{name}.{n}" for n, _ in (*old.named_parameters(), *new.named_parameters()))
        for parent, key in places:
            setattr(parent, key, new)  # a parent may note what its norms take

        def blocked() -> str | None:
            moved = any(parent._modules.get(key) is not new for parent, key in places)
            return f"{name} is another module now" if moved else None

        def back() -> None:
            for parent, key in places:
                setattr(parent, key, old)

        self._log.append((blocked, back))

    def set_attribute(self, owner: object, key: str, value: object) -> None:
        """Rebind a plain attribute."""
        before = getattr(owner, key)
        setattr(owner, key, value)
        self._log.append((lambda: None, lambda: setattr(owner, key, before)))

    def revert(self) -> None:
        """Take all back, last change first.

        Raises:
            ConversionError: something that was changed has been replaced since (by sharding, for example).
        """
        for blocked, _ in self._log:
            reason = blocked()
            if reason is not None:
                raise ConversionError(f"it cannot be undone: {reason}; undo before the model is wrapped or sharded")
        while self._log:
            self._log.pop()[1]()

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self.model.get_submodule(path), key


def holders(model: nn.Module, child: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every (parent, key) that holds a module."""
    for parent in model.modules():
        for key, value in parent._modules.items():
            if value is child:
                yield parent, key


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def dress(new: nn.Module, old: nn.Module) -> nn.Module:
    """Give a module that takes another's place its mode and its hooks (their handles go on working)."""
    new.train(old.training)
    for name in HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]
    return new
