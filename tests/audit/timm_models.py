"""timm without torchvision: it imports torchvision for transforms that no model here needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class _Anything(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def create(name: str, **options: Any) -> Any:
    """A timm model in eval mode; the test is skipped where timm is not installed."""
    if "timm" not in sys.modules:
        finder = _Finder()
        sys.meta_path.append(finder)  # last: an installed torchvision comes first
        try:
            pytest.importorskip("timm")
        finally:
            sys.meta_path.remove(finder)
            for module in [m for m, found in sys.modules.items() if isinstance(found, _Stub)]:
                del sys.modules[module]
    return sys.modules["timm"].create_model(name, **options).eval()
