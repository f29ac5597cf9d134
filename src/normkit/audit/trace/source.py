"""Which line of the model's own source ran an operator."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_ROOTS = tuple(str(Path(root).parent) + "/" for root in (torch.__file__, __file__))  # torch's files, and this room's
_FOREIGN: dict[str, bool] = {}


def _is_foreign(file: str) -> bool:
    """Whether a file is the model's, rather than torch's, this tracer's or generated code."""
    found = _FOREIGN.get(file)
    if found is None:
        found = _FOREIGN[file] = not file.startswith((*_ROOTS, "<"))
    return found


def calling_line() -> tuple[str, int] | None:
    """The innermost frame of the model's code below this call; None where only torch's own code runs."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_foreign(frame.f_code.co_filename):
            name = frame.f_globals.get("__name__", "")
            if name.startswith("normkit.audit"):
                return None
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
