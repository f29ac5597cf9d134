"""Default configs with fewer layers, so that many architectures can be looked at in little time."""

from __future__ import annotations

import re
from typing import Any

from normkit.audit.load import ModelError, default_config

_DEPTHS = re.compile(r"(num_|n_)?(\w*_)?(layers?|blocks)$")

_KEPT = ("model_type", "out_features", "out_indices")
"""What a part of a config keeps: a backbone's outputs are what the rest is built for."""


def shallow(kind: str, layers: int) -> Any:
    """The default config of a transformers model type with every stack cut to a few layers, where it allows that.

    Raises:
        ModelError: it has no default config.
    """
    whole = default_config(kind)
    cut = {k: v for k, v in _cut(whole.to_dict(), layers).items() if hasattr(whole, k)}
    for given in (cut, {k: v for k, v in cut.items() if not isinstance(v, dict)}):
        try:
            return default_config(kind, **given)
        except ModelError:
            continue
    return whole


def _cut(values: dict[str, Any], layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("_config"):
            found[key] = _cut(value, layers) | {k: value[k] for k in _KEPT if value.get(k)}
        elif _DEPTHS.fullmatch(key) and type(value) is int and value > layers:
            found[key] = layers
        elif key == "depths" and isinstance(value, list):
            found[key] = [min(n, layers) for n in value]
    return found
