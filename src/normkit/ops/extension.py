"""Loading the native extension, and saying what was found.

A missing or unusable extension is a designed state: everything then runs on plain PyTorch, the first use says so once
with the reason, and `report` tells what was built for what.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_LIBRARY = "normkit_native.so"


@dataclass(frozen=True)
class Report:
    """What the native extension is here, and why not if it is not."""

    loaded: bool
    reason: str
    """Why it is not loaded; empty when it is."""
    path: str | None
    instruction_set: str | None
    """The kernels in use: baseline, avx2, avx512 or avx512_bf16 (NORMKIT_ISA forces a lower one)."""
    torch: str
    built: dict[str, str]
    """The torch, stable ABI, compiler and processor of the build; or ``without``, why it has no extension."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def _load() -> Report:
    build_file = _HERE / "_build.json"
    built: dict[str, str] = json.loads(build_file.read_text()) if build_file.exists() else {}
    path = _HERE / _LIBRARY
    reason = ""
    if os.environ.get("NORMKIT_NO_NATIVE", "0") not in ("", "0"):
        reason = "the environment variable NORMKIT_NO_NATIVE is set; unset it to have the kernels"
    elif not path.exists():
        reason = (
            f"{path.name} is not installed: {built.get('without', 'the package was not built, or its build failed')}. "
            "Install again where there is a C++20 compiler: pip install --no-build-isolation normkit"
        )
    else:
        try:
            torch.ops.load_library(str(path))
        except (OSError, RuntimeError) as error:
            reason = (
                f"{path.name} did not load into torch {torch.__version__} (built with torch {built.get('torch', '?')}, "
                f"needs torch >= {built.get('stable_abi', '?')}); install a torch that does, or install normkit again "
                f"with --no-build-isolation: {error}"
            )
    if reason:
        return Report(False, reason, str(path) if path.exists() else None, None, torch.__version__, built)
    name: str = torch.ops.normkit.instruction_set()
    return Report(True, "", str(path), name, torch.__version__, built)


REPORT = _load()
LOADED = REPORT.loaded
_warned = False


def report() -> Report:
    """What `normkit env` shows about the native extension."""
    return REPORT


def warn_once() -> None:
    """Say, at the first use of a CPU norm without the extension, that it runs on plain PyTorch, and why."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"normkit runs on plain PyTorch, without its native kernels: {REPORT.reason}", stacklevel=3)
