"""Example inputs: guessed from a model's signature and config, or read from the command line."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.trace import trace

_BATCH, _LENGTH, _TARGET_LENGTH = 2, 16, 9
_TRIED = 12
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}  # fmt: skip


class InputError(Exception):
    """No inputs can be made; the message says what to give."""


def guess_inputs(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Inputs for a transformers model, from its forward's parameter names and its config's sizes.

    Where several layouts are in use for one kind of input, the first that the model runs on is taken.

    Raises:
        InputError: the model has no input that is known here.
    """
    parameters = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "") or next(iter(parameters), ""))
    tries = list(_candidates(model, config, main, parameters))
    if not tries:
        raise InputError(
            f"no guess for the inputs of {type(model).__name__} (forward takes {', '.join(parameters) or 'nothing'}); "
            "give them as --inputs NAME=SHAPE:DTYPE, for example --inputs x=2x16x64:float32"
        )
    if len(tries) == 1:
        return tries[0]
    return next((given for given in tries if runs(model, given)), tries[0])


def complete(model: nn.Module, config: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that a user gave, with guesses for the rest of what the model needs.

    Raises:
        InputError: nothing was given, and the model has no input that is known here.
    """
    _check_names(model, given)
    if not given:
        return guess_inputs(model, config)
    parameters = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "") or next(iter(parameters), ""))
    other = any(name in parameters and _layouts(name, config) for name in given)  # it stands for the main input
    wanted = [n for n in (*(() if other else (main,)), *_required(parameters)) if n in parameters and n not in given]
    guessed = {n: layouts[0] for n in wanted if (layouts := _layouts(n, config))}
    made = _completed({**guessed, **given}, config, parameters)
    return {**made, **given}


def _check_names(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Refuse names that neither the model nor, where it passes keywords on, any part of it takes."""
    parameters = inspect.signature(model.forward).parameters
    unknown = [name for name in given if name not in parameters]
    if unknown and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        taken = {name for module in model.modules() for name in inspect.signature(module.forward).parameters}
        unknown = [name for name in unknown if name not in taken]
    if unknown:
        raise InputError(
            f"{type(model).__name__} takes no input {unknown[0]!r}; it takes "
            f"{', '.join(n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD)}"
        )


def _candidates(model: nn.Module, config: Any, main: str, parameters: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Sets of inputs, the likeliest first."""
    names = [n for n in (main, *_needed_beside(model, main), *_required(parameters)) if n in parameters]
    choices = {n: layouts for n in dict.fromkeys(names) if (layouts := _layouts(n, config))}
    if not choices:
        return
    for picked in itertools.islice(itertools.product(*choices.values()), _TRIED):
        yield _completed(dict(zip(choices, picked, strict=True)), config, parameters)
    image = next((n for n in ("pixel_values",) if n in choices), None)
    if image is not None and "input_ids" in parameters and hasattr(model, "get_image_features"):
        for pixels in choices[image]:
            ids = _image_tokens(model, config, pixels)
            if ids is not None:
                yield _completed({"input_ids": ids, image: pixels}, config, parameters)
    if len(choices) > 1 and "input_ids" in choices:
        yield _completed({"input_ids": choices["input_ids"][0]}, config, parameters)


def _completed(inputs: dict[str, Tensor], config: Any, parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    """With the decoder's tokens and the mask that go with some inputs."""
    pair = getattr(config, "is_encoder_decoder", False) or getattr(config, "decoder", None) is not None
    if pair and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _tokens(config, _TARGET_LENGTH)
    if "input_ids" in inputs and "attention_mask" in parameters:
        inputs["attention_mask"] = torch.ones(inputs["input_ids"].shape, dtype=torch.int64)
    return inputs


def runs(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a model runs on some inputs."""
    device = _device(model)
    given: dict[str, Any] = {name: materialize(value, device) for name, value in inputs.items()}
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    return trace(model, (), given).error is None


def _device(model: nn.Module) -> str:
    """Meta as soon as one parameter is there: a model may make some of its parameters on a device of its own."""
    devices = [str(p.device) for p in model.parameters()] or ["cpu"]
    return "meta" if "meta" in devices else devices[0]


def _image_tokens(model: nn.Module, config: Any, pixels: Tensor) -> Tensor | None:
    """Tokens that all stand for pieces of an image: as many as the model makes of these pixels."""
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    device = _device(model)
    holder = _ImageFeatures(model)
    recorded = trace(holder, (pixels.to(device),))
    if token is None or recorded.error is not None or not recorded.outputs:
        return None
    width = getattr(getattr(config, "text_config", config), "hidden_size", None)
    made = [recorded.values[v].shape for v in recorded.outputs if recorded.values[v].shape[-1:] == (width,)]
    count = sum(math.prod(shape[:-1]) for shape in made)
    return torch.full((_BATCH, count // _BATCH), token, dtype=torch.int64) if count else None


class _ImageFeatures(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Any:
        features = self.model.get_image_features(pixel_values=pixels)  # type: ignore[operator]
        pooled = getattr(features, "pooler_output", None)
        return features if pooled is None else pooled


def _required(parameters: Mapping[str, Any]) -> list[str]:
    """Arguments without a default."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and p.kind not in kinds]


def _needed_beside(model: nn.Module, main: str) -> tuple[str, ...]:
    """A model over two modalities needs the other one as well: it declares them all as inputs of equal rank."""
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    both = getattr(config, "vision_config", None) is not None and getattr(config, "text_config", None) is not None
    return tuple(n for n in ("input_ids", "pixel_values") if both and n != main and n in parameters)


def _layouts(name: str, config: Any) -> list[Tensor]:
    """The layouts in which an input of this name is given to models."""
    if name in ("input", "inputs") and config is None:
        return []
    if name in ("input_ids", "decoder_input_ids", "inputs", "input", "qformer_input_ids", "task_inputs"):
        return [_tokens(config, _LENGTH)]
    if name in ("bbox",):
        return [torch.zeros(_BATCH, _LENGTH, 4, dtype=torch.int64)]
    if name in ("visual_feats", "visual_pos"):
        width = _find(config, "visual_feat_dim" if name == "visual_feats" else "visual_pos_dim", 64)
        return [_floats(_BATCH, 5, width)]
    if name in ("pixel_values", "pixel_values_videos"):
        return _images(config, video=name.endswith("videos"))
    if name == "input_features":
        mels = _find(config, "num_mel_bins", _find(config, "input_feat_per_channel", _find(config, "input_dim", 80)))
        frames = 2 * _find(config, "max_source_positions", 64)
        return [_floats(_BATCH, mels, frames), _floats(_BATCH, frames, mels)]
    if name == "input_values":
        mels, frames = _find(config, "num_mel_bins", 80), _find(config, "max_length", 128)
        return [_floats(_BATCH, 8000), _floats(_BATCH, 1, 8000), _floats(_BATCH, frames, mels)]
    return []


def _images(config: Any, video: bool) -> list[Tensor]:
    """Images as B C H W, as several for each sample, and as flat patches."""
    channels = _find(config, "num_channels", _find(config, "in_channels", 3))
    size = _find(config, "image_size", _find(config, "crop_size", 64))
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames, patch = _find(config, "num_frames", _find(config, "frames_per_clip", 2)), _find(config, "patch_size", 16)
    single = [] if video else [_floats(_BATCH, channels, height, width)]
    several = _floats(_BATCH, frames if video or _says(config, "num_frames") else 1, channels, height, width)
    larger = [_floats(_BATCH, channels, 224, 224)] if not video and not _says(config, "image_size") else []
    square = patch * patch if isinstance(patch, int) else math.prod(patch)
    return [*single, *larger, several, _floats(_BATCH, 16, channels * square)]


def _says(config: Any, name: str) -> bool:
    return _find(config, name, None) is not None


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
        inputs[match[1]] = _floats(*shape).to(dtype) if dtype.is_floating_point else _integers(match[1], shape, dtype)
    return inputs


def _integers(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Whole numbers that differ from each other and are small enough for any vocabulary; ones for a mask."""
    if "mask" in name or dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.arange(math.prod(shape)).remainder(_LENGTH).reshape(shape).to(dtype)


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
