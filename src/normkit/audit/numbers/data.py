"""Batches to measure on, as a user names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from normkit.audit.load import Loaded
from normkit.audit.numbers.measure import Batch, DataError

WHERE_POSSIBLE = "inputs?"
"""The audit's inputs, where the weights are real."""


def read_data(names: Sequence[str], loaded: Loaded) -> list[Batch] | None:
    """The batches of ``--data``: safetensors files of inputs by name, or ``inputs``.

    In a file, ``input_ids`` is one batch; ``0.input_ids``, ``1.input_ids``, ... are several. Inputs of the audit that
    are no tensors (``use_cache=False``) are passed along.

    Args:
        names: paths, ``inputs``, or `WHERE_POSSIBLE`.
        loaded: the model and its own inputs.

    Returns:
        The batches; None where nothing is to be measured.

    Raises:
        DataError: a file that cannot be read, or holds no tensors.
    """
    batches: list[Batch] = []
    for name in names:
        if name == WHERE_POSSIBLE and any(p.is_meta for p in loaded.model.parameters()):
            return None
        if name in ("inputs", WHERE_POSSIBLE):
            batches.append(loaded.args or loaded.kwargs)
        else:
            options = {k: v for k, v in loaded.kwargs.items() if not isinstance(v, Tensor)}
            batches += [options | batch for batch in _read(Path(name))]
    return batches or None


def _read(path: Path) -> list[dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        raise DataError(f"--data {path} must be a .safetensors file of inputs by name, or the word inputs")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read --data {path}: {error}") from error
    if not tensors:
        raise DataError(f"--data {path} holds no tensors; save the model's inputs by name")
    batches: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(\d+)\.(.+)", name)
        batches.setdefault(int(match[1]) if match else -1, {})[match[2] if match else name] = tensor
    return [batches[number] for number in sorted(batches)]
