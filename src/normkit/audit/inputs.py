"""Example inputs: guessed from a model's signature and config, or read from the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_BATCH, _LENGTH, _TARGET_LENGTH = 2, 16, 9
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}  # fmt: skip


class InputError(Exception):
    """No inputs can be made; the message says what to give."""


def guess_inputs(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Inputs for a transformers model, from its forward's parameter names and its config's sizes.

    Raises:
        InputError: the model has no input that is known here.
    """
    parameters = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "") or next(iter(parameters), ""))
    inputs: dict[str, Tensor] = {}
    for name in (main, *_needed_beside(model, main)):
        made = _make(name, config)
        if made is not None and name in parameters:
            inputs[name] = made
    if not inputs:
        raise InputError(
            f"no guess for the inputs of {type(model).__name__} (forward takes {', '.join(parameters) or 'nothing'}); "
            "give them as --inputs NAME=SHAPE:DTYPE, for example --inputs x=2x16x64:float32"
        )
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _tokens(config, _TARGET_LENGTH)
    if "input_ids" in inputs and "attention_mask" in parameters:
        inputs["attention_mask"] = torch.ones(inputs["input_ids"].shape, dtype=torch.int64)
    return inputs


def _needed_beside(model: nn.Module, main: str) -> tuple[str, ...]:
    """A model over two modalities needs the other one as well: it declares them all as inputs of equal rank."""
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    both = getattr(config, "vision_config", None) is not None and getattr(config, "text_config", None) is not None
    return tuple(n for n in ("input_ids", "pixel_values") if both and n != main and n in parameters)


def _make(name: str, config: Any) -> Tensor | None:
    if name in ("input_ids", "decoder_input_ids"):
        return _tokens(config, _LENGTH)
    if name == "pixel_values":
        channels = _find(config, "num_channels", 3)
        size = _find(config, "image_size", 64)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return _floats(_BATCH, channels, height, width)
    if name == "input_features":
        frames = 2 * _find(config, "max_source_positions", 64)
        return _floats(_BATCH, _find(config, "num_mel_bins", _find(config, "input_feat_per_channel", 80)), frames)
    if name == "input_values":
        return _floats(_BATCH, 8000)
    return None


def _tokens(config: Any, length: int) -> Tensor:
    vocabulary = _find(config, "vocab_size", 100)
    generator = torch.Generator().manual_seed(0)
    low = min(3, max(0, vocabulary - 1))  # the first ids are often padding and other special tokens
    return torch.randint(low, vocabulary, (_BATCH, length), generator=generator)


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _find(config: Any, name: str, default: Any) -> Any:
    """A config value, also from the config of one modality."""
    for owner in (config, *(getattr(config, part, None) for part in ("text_config", "vision_config", "audio_config"))):
        value = getattr(owner, name, None)
        if value is not None:
            return value
    return default


def parse_inputs(specifications: Iterable[str]) -> dict[str, Tensor]:
    """Read ``NAME=SHAPE:DTYPE`` (``x=2x16x64:float32``, ``input_ids=2x16:int64``) or the path of a safetensors file.

    Raises:
        InputError: a text that is neither, with an example of what is.
    """
    inputs: dict[str, Tensor] = {}
    for text in specifications:
        if text.endswith(".safetensors"):
            inputs |= _read(Path(text))
            continue
        match = re.fullmatch(r"(\w+)=(\d+(?:x\d+)*)(?::(\w+))?", text)
        dtype = _DTYPES.get(match[3] or "float32") if match else None
        if match is None or dtype is None:
            raise InputError(
                f"--inputs {text!r} is not NAME=SHAPE:DTYPE; write for example input_ids=2x16:int64 "
                f"(dtypes: {', '.join(_DTYPES)}), or give a .safetensors file"
            )
        shape = tuple(int(n) for n in match[2].split("x"))
        inputs[match[1]] = _floats(*shape).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)
    return inputs


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read --inputs {path}: {error}") from error


def materialize(value: Any, device: str | None) -> Any:
    """A tensor on the device the model is on; anything else unchanged."""
    return value.to(device) if isinstance(value, Tensor) and device is not None else value
