"""Register: norms and placements of one's own, by name, and references to them that a worker can follow."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from normkit.errors import described
from normkit.nn import build
from normkit.placement import Placement, known
from normkit.spec import NAMED, TORCH_LAYER, TORCH_RMS, NormSpec

MakeNorm = Callable[[int], nn.Module]
"""The number of features to a module that normalizes ``(..., features)``."""


def _takes_one_input(spec: NormSpec) -> bool:
    return spec.axes == "features" and spec.channel_dim == -1 and spec.gate is None


BUILT_IN: dict[str, NormSpec] = {
    "layer": TORCH_LAYER,
    "rms": TORCH_RMS.replace(eps=1e-6),
    **{name: spec for name, spec in NAMED.items() if _takes_one_input(spec)},
}
"""The built-in norms of one input over features, by the names that ``--norm`` takes."""

_REGISTERED: dict[str, object] = {}


class CandidateError(ValueError):
    """A norm or placement cannot be had; the message is for the user."""


def register(name: str) -> Callable[[Any], Any]:
    """Register a norm or a placement of one's own for `normkit lab compare`.

    Decorates a class or function that makes a norm from its number of features, or is called on a
    `normkit.Placement`::

        @normkit.lab.register("my-norm")
        class MyNorm(torch.nn.Module):
            def __init__(self, features): ...

        normkit.lab.register("damped")(normkit.Placement(name="damped", input_norm=True, branch_scale=0.5, ...))

    Args:
        name: what ``--norm`` and ``--placement`` call it, after the file: ``--norm my_file.py:my-norm``.

    Returns:
        A decorator that gives back what it decorates.

    Raises:
        ValueError: an empty name, one with a colon, or one that is taken.
        TypeError: at the call, something that can be neither.
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise ValueError(f"name must be a string without colon that is not empty; got {name!r}")
    if name in BUILT_IN or name in known():
        raise ValueError(f"the name {name!r} belongs to a built-in one; choose another")

    def decorate(thing: Any) -> Any:
        if not callable(thing) and not isinstance(thing, Placement):
            raise TypeError(f"register takes a class or function that makes a norm, or a Placement; got {thing!r}")
        taken = _REGISTERED.get(name)
        if taken is not None and _where(taken) != _where(thing):
            raise ValueError(f"the name {name!r} is taken by {taken!r}; choose another")
        _REGISTERED[name] = thing
        return thing

    return decorate


def registered() -> dict[str, object]:
    """Everything that was registered in this process."""
    return dict(_REGISTERED)


def find_norm(reference: str) -> MakeNorm:
    """The norm that a reference names.

    Args:
        reference: a key of `BUILT_IN`, a registered name, ``package.module:Name`` or ``path/to/file.py:Name``, where
            Name is an attribute of the module or a name that it registers.

    Raises:
        CandidateError: nothing of that name, or it is no norm.
    """
    if reference in BUILT_IN:
        spec = BUILT_IN[reference]
        return lambda features: build(spec, features)
    found = _follow(reference, f"a built-in norm ({', '.join(BUILT_IN)})")
    if isinstance(found, NormSpec):
        return lambda features: build(found, features)
    if isinstance(found, Placement) or not callable(found):
        raise CandidateError(f"{reference} is no norm: it must make a module from its number of features")
    if isinstance(found, nn.Module):
        raise CandidateError(f"{reference} is one module; give its class, or a function of the number of features")
    return found


def find_placement(reference: str) -> str | Placement:
    """The placement that a reference names: as `find_norm`, with the names of `normkit.PLACEMENTS` built in."""
    if reference in known():
        return reference
    found = _follow(reference, f"a built-in placement ({', '.join(known())})")
    if callable(found) and not isinstance(found, type):
        found = found()
    if not isinstance(found, Placement):
        raise CandidateError(f"{reference} is no normkit.Placement; it is {type(found).__name__}")
    return found


def absolute(reference: str) -> str:
    """The same reference, wherever a worker's working folder is."""
    place, colon, name = reference.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if colon and place.endswith(".py") else reference


def _follow(reference: str, built_in: str) -> Any:
    if reference in _REGISTERED:
        return _REGISTERED[reference]
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise CandidateError(
            f"{reference!r} is not {built_in}; one of your own is package.module:Name or path/to/file.py:Name"
        )
    module = _load(place)
    if name in _REGISTERED:
        return _REGISTERED[name]
    try:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise CandidateError(f"{place} has no {name}") from None
    return found


def _load(place: str) -> ModuleType:
    """Import a module by its name, or from a file anywhere."""
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise CandidateError(f"there is no file {place}")
        name = f"_normkit_user_{hashlib.sha1(str(path).encode()).hexdigest()[:12]}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise CandidateError(f"{place} cannot be imported: {described(error)}") from error
        return module
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise CandidateError(f"{place} cannot be imported: {described(error)}") from error


def _where(thing: object) -> tuple[str, object]:
    """What is the same for one definition imported twice."""
    return getattr(thing, "__module__", ""), getattr(thing, "__qualname__", thing)
