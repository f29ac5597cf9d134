"""Who computes it. A provider makes a `Step` of a case and its inputs, or None where it has nothing for the case.

Each is in a module of its own that is imported where it is used: none but torch is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from normkit.bench.grid import Case, Inputs
from normkit.bench.providers.step import Step


@dataclass(frozen=True)
class Provider:
    """A name in the results, and where it comes from."""

    name: str
    module: str
    """``module:function`` in this package; the function takes a case and its inputs."""
    packages: tuple[str, ...]
    """The distributions that it needs, the one that computes first; each is imported by its own name."""

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in self.packages)

    @property
    def version(self) -> str:
        from importlib.metadata import version

        return version(self.packages[0])

    def make(self, case: Case, inputs: Inputs) -> Step | None:
        """The step, ready to be called, on ``case.threads`` threads."""
        module, function = self.module.split(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), function)(case, inputs)


PROVIDERS = {
    p.name: p
    for p in (
        Provider("normkit", "eager:normkit", ("normkit",)),
        Provider("torch", "eager:torch_eager", ("torch",)),
        Provider("model code", "eager:model_code", ("torch",)),
        Provider("torch.compile", "compiled:make", ("torch",)),
        Provider("onnxruntime", "onnx_runtime:make", ("onnxruntime", "onnx")),
        Provider("openvino", "open_vino:make", ("openvino",)),
        Provider("jax", "xla:make", ("jax",)),
    )
}
COMPILING = ("torch.compile",)
"""Those whose compiled code is kept on disk, so that a first pass warms a later one."""


def installed() -> tuple[str, ...]:
    """The names of the providers that can be used here."""
    return tuple(name for name, provider in PROVIDERS.items() if provider.installed)
