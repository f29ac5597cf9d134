"""Text as characters: Python's own source, and the prose of its help topics."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

VOCABULARY = 97
"""The printable ASCII characters, the end of a line, and one for all others."""

Corpus = Literal["source", "prose"]
_MODULES = ("argparse", "ast", "dataclasses", "inspect", "pathlib", "statistics", "tarfile", "textwrap", "typing")


class Text(NamedTuple):
    """Characters as numbers below `VOCABULARY`: the first nine tenths to train on, the rest to validate."""

    train: Tensor
    validation: Tensor


@lru_cache(maxsize=2)
def text(corpus: Corpus = "source") -> Text:
    """Modules of the standard library in a row, or the help topics behind ``help()``."""
    if corpus == "prose":
        from pydoc_data.topics import topics

        found = "\n".join(topics[name] for name in sorted(topics))
    else:
        found = "\n".join(_source(name) for name in _MODULES)
    codes = torch.tensor(list(found.encode("ascii", "replace")))
    codes = torch.where((codes >= 32) & (codes < 127), codes - 32, torch.where(codes == 10, 95, 96))
    cut = len(codes) * 9 // 10
    return Text(codes[:cut], codes[cut:])


def _source(module: str) -> str:
    """The source of a module, which is not imported; a package's is its ``__init__``."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def windows(characters: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """(inputs, the next characters), each ``(B, T)``, from places drawn from torch's generator."""
    starts = torch.randint(0, len(characters) - length - 1, (batch,))
    found = characters[starts[:, None] + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


def fixed_windows(characters: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """The same windows at every call, evenly spaced: what validation losses are compared on."""
    starts = torch.linspace(0, len(characters) - length - 2, batch).long()
    found = characters[starts[:, None] + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]
