"""Take every class, attribute and module name out of a model, leaving what it computes."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

_OWN = set(nn.Module().__dict__)


def scramble(model: nn.Module) -> None:
    """Rename in place: classes, submodules, parameters, buffers and plain attributes of every module.

    The forward code still asks for the old names; a private class answers with the renamed ones.
    """
    counter = itertools.count()
    for module in list(model.modules()):
        names: dict[str, str] = {}
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict | nn.ParameterList):
            for store in (module._modules, module._parameters, module._buffers):
                _rename(store, names, counter)  # type: ignore[arg-type]
            plain = {k: v for k, v in module.__dict__.items() if k not in _OWN and not k.startswith("_")}
            for name in plain:
                names[name] = f"a{next(counter)}"
                module.__dict__[names[name]] = module.__dict__.pop(name)
        persistent = {names.get(n, n) for n in module._non_persistent_buffers_set}
        module.__dict__["_non_persistent_buffers_set"] = persistent
        module.__dict__["_scrambled"] = names
        module.__class__ = _scrambled_class(type(module), f"C{next(counter)}")


def _rename(store: dict[str, Any], names: dict[str, str], counter: Any) -> None:
    for name in list(store):
        names[name] = f"a{next(counter)}"
        store[names[name]] = store.pop(name)


def _scrambled_class(cls: type[nn.Module], name: str) -> type[nn.Module]:
    def lookup(self: nn.Module, wanted: str) -> Any:
        renamed = self.__dict__.get("_scrambled", {}).get(wanted)
        if renamed is None:
            return cls.__getattr__(self, wanted)
        if renamed in self.__dict__:
            return self.__dict__[renamed]
        return cls.__getattr__(self, renamed)

    return type(name, (cls,), {"__getattr__": lookup, "__qualname__": name, "__module__": "scrambled"})
