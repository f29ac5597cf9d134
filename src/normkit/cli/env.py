"""``normkit env``: what runs here."""

from __future__ import annotations

import importlib.metadata
import platform

import typer


def command() -> None:
    """Show versions and what normkit computes with here. Example: normkit env"""
    import torch

    import normkit

    rows = {
        "normkit": normkit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "norms run on": "the reference in plain PyTorch",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}  {value}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
