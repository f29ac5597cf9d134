"""Example inputs: guessed from a model's signature and config, or read from the command line."""

from __future__ import annotations

import inspect
import itertools
import linecache
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit.layouts import BATCH, LENGTH, floats, layouts, patches, target_tokens, tokens
from normkit.audit.trace import trace
from normkit.audit.trace.graph import Trace

_TRIED = 12
_ADDED = 5
"""How many inputs may be added, one after another, because the model asks for them."""
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}  # fmt: skip


class InputError(Exception):
    """No inputs can be made; the message says what to give."""


def guess_inputs(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Inputs for a transformers model, from its forward's parameter names, its config's sizes and its documentation.

    Where several layouts are in use for one kind of input, the first that the model runs on is taken; if it runs on
    none, the one that it gets farthest with, and what it then asks for.

    Raises:
        InputError: the model has no input that is known here.
    """
    if type(model).forward is nn.Module.forward:
        parts = ", ".join(name for name, _ in model.named_children())
        raise InputError(
            f"{type(model).__name__} has no forward of its own: audit its parts ({parts or 'it has none'}), each by a "
            "package.module:factory that returns (part, inputs)"
        )
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
    alone = tries.pop() if _is_part(tries[-1], tries[0]) else None
    best = _farthest(model, tries)
    made = helped(model, config, best)  # comes back as it was only where the model does not run
    if made is not best or alone is None:
        return made
    return _farthest(model, [best, alone])


def helped(model: nn.Module, config: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs with what the model complains that it lacks, if that makes it run; else as they were."""
    parameters = inspect.signature(model.forward).parameters
    more = dict(given)
    for _ in range(_ADDED):
        error = _trial(model, more).error
        if error is None:
            return more
        lacking = [n for n in _asked_for(error, parameters) if n not in more and layouts(n, config, model)]
        if not lacking:
            break
        tries = [{**more, lacking[0]: layout} for layout in layouts(lacking[0], config, model)]
        more = _farthest(model, tries) if len(tries) > 1 else tries[0]
    return given


def _is_part(given: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether a set of inputs is another one without a modality."""
    return len(given) < len(other) and given.keys() < other.keys()


def _farthest(model: nn.Module, tries: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The first inputs that a model runs on; if there are none, those that it gets farthest with."""
    farthest, best = -1, tries[0]
    for given in tries:
        recorded = _trial(model, given)
        if recorded.error is None:
            return given
        if len(recorded.nodes) > farthest:
            farthest, best = len(recorded.nodes), given
    return best


def _asked_for(error: BaseException, parameters: Mapping[str, Any]) -> list[str]:
    """The arguments that an exception is about: named in its message, or None in the line that raised it."""
    text = str(error)
    found = [name for name in parameters if re.search(rf"\b{name}\b", text)]
    frame = error.__traceback__
    while frame is not None and isinstance(error, TypeError | AttributeError):
        line = linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
        held = frame.tb_frame.f_locals
        found += [n for n in parameters if held.get(n, n) is None and re.search(rf"\b{n}\b", line)]
        frame = frame.tb_next
    names = list(dict.fromkeys(found))
    return [n for n in names if not (n.endswith("inputs_embeds") and n.replace("inputs_embeds", "input_ids") in names)]


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
    other = any(name in parameters and layouts(name, config, model) for name in given)  # it stands for the main input
    wanted = [n for n in (*(() if other else (main,)), *_required(parameters)) if n in parameters and n not in given]
    guessed = {n: found[0] for n in wanted if (found := layouts(n, config, model))}
    made = _completed({**guessed, **given}, config, parameters, model)
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
    choices = {n: found for n in dict.fromkeys(names) if (found := layouts(n, config, model))}
    if "input_ids" in parameters:
        for given in _with_features(model, config, parameters):
            yield _completed(given, config, parameters, model)
    for picked in itertools.islice(itertools.product(*choices.values()), _TRIED if choices else 0):
        yield _completed(dict(zip(choices, picked, strict=True)), config, parameters, model)
    if len(choices) > 1 and "input_ids" in choices:
        yield _completed({"input_ids": choices["input_ids"][0]}, config, parameters, model)


def _completed(
    inputs: dict[str, Tensor], config: Any, parameters: Mapping[str, Any], model: nn.Module
) -> dict[str, Tensor]:
    """With the decoder's tokens and the mask that go with some inputs."""
    pair = getattr(config, "is_encoder_decoder", False) or getattr(config, "decoder", None) is not None
    if pair and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = target_tokens(config, model)
    if "input_ids" in inputs and "attention_mask" in parameters:
        inputs["attention_mask"] = torch.ones(inputs["input_ids"].shape, dtype=torch.int64)
    return inputs


def runs(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a model runs on some inputs."""
    return _trial(model, inputs).error is None


def _trial(model: nn.Module, inputs: Mapping[str, Any]) -> Trace:
    given = placed(inputs, _device(model))
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    return trace(model, (), given)


def _device(model: nn.Module) -> str:
    """Meta as soon as one parameter is there: a model may make some of its parameters on a device of its own."""
    devices = [str(p.device) for p in model.parameters()] or ["cpu"]
    return "meta" if "meta" in devices else devices[0]


_MODALITIES = (
    ("get_image_features", ("pixel_values",), ("image_token_id", "image_token_index")),
    ("get_audio_features", ("input_features", "input_values"), ("audio_token_id", "audio_token_index")),
)
"""(what makes features of one modality, what it makes them of, where the config has the token that stands for them)."""
_PLACES = ("_position_mask", "_seq_mask")
"""How an argument is called that says which tokens stand for features, where no token of their own does."""


def _with_features(model: nn.Module, config: Any, parameters: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Tokens that all stand for pieces of an image or of a sound: as many as the model makes of it."""
    for getter, sources, ids in _MODALITIES:
        method = getattr(model, getter, None)
        token = next((t for name in ids if (t := getattr(config, name, None)) is not None), None)
        source = next((name for name in sources if name in parameters), None)
        mask = next((name for name in parameters if name.endswith(_PLACES)), None)
        if method is None or (token is None and mask is None) or source is None:
            continue
        taken = inspect.signature(method).parameters
        grid = {n: found[0] for n in taken if "grid" in n and n in parameters and (found := layouts(n, config, model))}
        others = [n for n in _required(taken) if n != source and n in parameters]
        needed = {n: found[0] for n in others if (found := layouts(n, config, model))}
        for tensor in [patches(config)] if grid and source == "pixel_values" else layouts(source, config, model):
            given = {source: tensor, **grid, **needed}
            count = _features(model, method, config, given)
            if count:
                length = count // BATCH
                text = {"input_ids": tokens(config, length)}
                if token is not None:
                    text = {"input_ids": torch.full((BATCH, length), token, dtype=torch.int64)}
                elif mask is not None:
                    text[mask] = torch.ones(BATCH, length, dtype=torch.bool)
                if "mm_token_type_ids" in parameters:
                    text["mm_token_type_ids"] = torch.ones_like(text["input_ids"])
                yield {**text, **given}


def _features(model: nn.Module, method: Any, config: Any, given: dict[str, Tensor]) -> int:
    """How many vectors as wide as the text's a model makes of an image or a sound; 0 if it does not run."""
    recorded = trace(_Features(model, method), (), placed(given, _device(model)))
    if recorded.error is not None:
        return 0
    width = getattr(getattr(config, "text_config", config), "hidden_size", None)
    made = [recorded.values[v].shape for v in recorded.outputs if recorded.values[v].shape[-1:] == (width,)]
    return sum(math.prod(shape[:-1]) for shape in made)


class _Features(nn.Module):
    def __init__(self, model: nn.Module, method: Any) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, **given: Tensor) -> Any:
        features = self.method(**given)
        pooled = getattr(features, "pooler_output", None)
        return features if pooled is None else pooled


def _required(parameters: Mapping[str, Any]) -> list[str]:
    """Arguments without a default."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and p.kind not in kinds]


_INPUTS_OF = (
    ("text_config", ("input_ids",)),
    ("vision_config", ("pixel_values",)),
    ("audio_config", ("input_features", "input_values")),
)
"""(the part of a config, what that modality's input is called)."""


def _needed_beside(model: nn.Module, main: str) -> tuple[str, ...]:
    """A model over two modalities needs the other one as well: it declares them all as inputs of equal rank."""
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    names = [names for part, names in _INPUTS_OF if getattr(config, part, None) is not None]
    beside = [next((n for n in several if n in parameters), main) for several in names] if len(names) > 1 else []
    return tuple(n for n in beside if n != main)


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
        try:
            made = floats(*shape).to(dtype) if dtype.is_floating_point else _integers(match[1], shape, dtype)
        except (RuntimeError, MemoryError, OverflowError):
            raise InputError(f"--inputs {text!r} is more than memory holds; give a smaller shape") from None
        inputs[match[1]] = made
    return inputs


def _integers(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Whole numbers that differ from each other and are small enough for any vocabulary; ones for a mask."""
    if "mask" in name or dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.arange(math.prod(shape)).remainder(LENGTH).reshape(shape).to(dtype)


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


def placed(inputs: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """Inputs on the device that the model is on.

    On meta, whole numbers keep their values beside an image or a sound: tokens are counted that stand for its pieces,
    and a grid says how many there are.
    """
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    counted = device == "meta" and any(tensor.is_floating_point() for tensor in tensors)

    def stays(value: Any) -> bool:
        return counted and isinstance(value, Tensor) and not value.is_floating_point()

    return {name: value if stays(value) else materialize(value, device) for name, value in inputs.items()}
