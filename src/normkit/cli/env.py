"""``normkit env``: what runs here."""

from __future__ import annotations

import importlib.metadata
import platform

import typer


def command() -> None:
    """Show versions and what normkit computes with here. Example: normkit env"""
    import torch

    import normkit
    from normkit import ops

    native = ops.report()
    rows = {
        "normkit": normkit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "norms run on": f"native kernels, {native.instruction_set}" if native.loaded else "plain PyTorch",
        "extension": native.path or "not found",
    }
    if "torch" in native.built:
        built = native.built
        rows["built"] = f"for torch >= {built['stable_abi']}, with torch {built['torch']} and {built['compiler']}"
    if not native.loaded:
        rows["why no kernels"] = native.reason
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}  {value}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
