"""Where `normkit explain` gets a spec and numbers from: words, files, a model's module."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit import spec as specs
from normkit.errors import message
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from normkit.audit.load import Loaded

KINDS: dict[str, NormSpec] = {
    "layer": specs.TORCH_LAYER,
    "rms": specs.TORCH_RMS.replace(eps=1e-6),
    "l2": specs.L2_NORMALIZE,
    "batch": specs.TORCH_BATCH,
    "instance": specs.TORCH_INSTANCE,
    "group": specs.TORCH_GROUP.replace(groups=2),
}
FILES = (".npy", ".pt", ".pth", ".safetensors")
MOST_MADE_UP = 10**6
"""Numbers that are made up at most; every element's set is worked out."""


class SourceError(ValueError):
    """There is nothing to explain; the message says what to give instead."""


@dataclass
class Subject:
    """Everything that `normkit.explain.explain` takes, and what a module itself gave."""

    spec: NormSpec
    x: Tensor
    parameters: dict[str, Tensor | None] = field(default_factory=dict)
    """Keyword arguments: weight, bias, gate, running statistics."""
    made_up: bool = False
    own_output: Tensor | None = None
    """What the audited module returned for x."""


def find_spec(name: str) -> NormSpec:
    """A kind (rms, layer, ...) or a named convention (gemma, t5, ...).

    Raises:
        SourceError: neither.
    """
    found = KINDS.get(name) or specs.NAMED.get(name.lower())
    if found is None:
        raise SourceError(
            f"no normalization or placement is called {name!r}; known are {', '.join(KINDS)}, the conventions "
            f"{', '.join(specs.NAMED)} and the placements (normkit explain --list)"
        )
    return found


def read_tensor(path: Path, key: str | None = None) -> Tensor:
    """A dense tensor of real numbers from a .npy, .pt or .safetensors file; nothing in it is executed.

    Raises:
        SourceError: no such file, no such tensor in it, or several and no key.
    """
    found = _only_tensor(_held(path), path, key)
    traits = {
        "sparse": found.layout != torch.strided,
        "complex": found.is_complex(),
        "quantized": found.is_quantized,
        "meta": found.is_meta,
    }
    form = next((name for name, has in traits.items() if has), None)
    if form is not None:
        raise SourceError(f"{path} holds a {form} tensor; store a dense one of real numbers")
    return found.detach()


def _held(path: Path) -> Any:
    """What a file holds."""
    if not path.is_file():
        raise SourceError(f"there is no file {path}")
    try:
        if path.suffix == ".npy":
            import numpy

            with path.open("rb") as file:
                if file.read(6) != numpy.lib.format.MAGIC_PREFIX:
                    raise SourceError(f"{path} is no .npy file; write one with numpy.save")
            array = numpy.load(path, allow_pickle=False)
            return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except SourceError:
        raise
    except ImportError as error:
        raise SourceError(f"{path.suffix} files need {error.name}: pip install {error.name}") from None
    except pickle.UnpicklingError:  # torch's own message is a page, and advises to execute the file
        raise SourceError(
            f"cannot read {path}: it holds more than tensors, and is not executed; save the tensor alone"
        ) from None
    except Exception as error:  # the readers raise many kinds
        raise SourceError(f"cannot read {path}: {message(error)}") from error


def _only_tensor(held: Any, path: Path, key: str | None) -> Tensor:
    """The tensor of that key, or the only one."""
    if isinstance(held, Tensor):
        return held
    tensors = {k: v for k, v in held.items() if isinstance(v, Tensor)} if isinstance(held, dict) else {}
    if key is None and len(tensors) == 1:
        return next(iter(tensors.values()))
    if not tensors:
        raise SourceError(f"{path} holds no tensor, nor a dictionary of tensors; it holds a {type(held).__name__}")
    if key not in tensors:
        names = ", ".join(list(tensors)[:8]) or "none"
        raise SourceError(f"{path} holds {len(tensors)} tensors; name one with --key (there are: {names})")
    return tensors[key]


def parse_numbers(texts: list[str], what: str) -> Tensor:
    """Numbers given as separate words or with commas.

    Raises:
        SourceError: a word that is no number, or none at all.
    """
    words = [w for text in texts for w in text.replace(",", " ").split()]
    try:
        values = [float(w) for w in words]
    except ValueError:
        bad = next(w for w in words if not _is_number(w))
        raise SourceError(f"{what} must be numbers or a file ({', '.join(FILES)}); got {bad!r}") from None
    if not values:
        raise SourceError(f"{what} holds no number")
    return torch.tensor(values, dtype=torch.float64)


def shaped(x: Tensor, spec: NormSpec, shape: tuple[int, ...] | None) -> Tensor:
    """x in the shape that is asked for, or in the least one that the kind needs: numbers are one position's features,
    one channel's batch, or one sample's channel.

    Raises:
        SourceError: a shape of another number of elements.
    """
    if shape is None:
        if x.dim() != 1:
            return x
        shape = {"features": (x.numel(),), "batch": (x.numel(), 1)}.get(spec.axes, (1, 1, x.numel()))
        if spec.axes == "group":
            shape = (1, x.numel(), 1)
        if spec.axes == "features" and spec.channel_dim == 1:
            shape = (1, x.numel())
        if isinstance(spec.channel_dim, tuple):
            shape = (*[1] * (len(spec.channel_dim) - 1), x.numel())
    if spec.channel_dim == -1 and spec.axes == "batch" and len(shape) == 1:
        shape = (*shape, 1)
    try:
        return x.reshape(shape)
    except RuntimeError:
        raise SourceError(f"--shape {'x'.join(map(str, shape))} does not hold {x.numel()} numbers") from None


def made_up(shape: tuple[int, ...]) -> Tensor:
    """Numbers to show a norm with where none are given: normal, mean 0.5, the same every time.

    Raises:
        SourceError: more than `MOST_MADE_UP`.
    """
    if math.prod(shape) > MOST_MADE_UP:
        raise SourceError(f"--shape {'x'.join(map(str, shape))} is {math.prod(shape)} numbers; {MOST_MADE_UP} at most")
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5


def from_model(loaded: Loaded, name: str) -> Subject:
    """The norm of that name in a model, with its parameters and the input that one run gives it.

    Raises:
        SourceError: no such norm, none that a spec describes, or one that did not run as a module.
    """
    from normkit.audit import audit

    result = audit(loaded.model, *loaded.args, **loaded.kwargs)
    try:
        norm = result[name]
    except KeyError:
        near = ", ".join(n.name for n in result.norms if n.name.endswith(name.rsplit(".", 1)[-1]))[:300]
        raise SourceError(f"no norm is called {name!r}; {near or 'normkit audit lists them'}") from None
    if norm.spec is None:
        raise SourceError(f"{name} is not described by a spec: {norm.reason}")
    if norm.functional or norm.module is None:
        raise SourceError(f"{name} is written inline: there is no module to look into")
    if any(p.is_meta for p in norm.module.parameters()):
        raise SourceError(f"{name} has no weights (meta device): give a model with weights, or --device cpu")
    seen: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    hook = norm.module.register_forward_hook(lambda _, a, k, out: seen.append((a, k, out)), with_kwargs=True)
    try:
        with torch.no_grad():
            loaded.model(*loaded.args, **loaded.kwargs)
    finally:
        hook.remove()
    args, kwargs, out = seen[0]
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    parameters: dict[str, Tensor | None] = {r: _attribute(norm.module, path) for r, path in norm.parameters.items()}
    if norm.batch_statistics:
        parameters |= {"running_mean": None, "running_var": None}
    if norm.spec.gate is not None:
        parameters["gate"] = next((t for t in tensors[1:] if t.shape == tensors[0].shape), None)
    return Subject(norm.spec, tensors[0].detach(), parameters, own_output=out if isinstance(out, Tensor) else None)


def _attribute(module: torch.nn.Module, path: str) -> Tensor:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value.detach()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
