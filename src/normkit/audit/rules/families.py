"""What each model family's published code computes: conventions by transformers' ``model_type``.

The table beside this file was measured, not written: ``python -m normkit.audit.rules.families`` audits the default
config of every architecture in transformers that builds, cut to a few layers and mostly on the meta device, and keeps
the conventions of its norm modules.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from normkit.audit.result import NormRecord
from normkit.spec import Kind, NormSpec

TABLE = "families.json"
_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How a family's norms of one kind compute."""

    kind: Kind
    has_weight: bool
    has_bias: bool
    weight_offset: float
    rounding: str
    gain_dtype: str
    starts_at: float | None = None
    """The stored gain that the family's own initialization gives; None where there is none, or it is not known."""

    @classmethod
    def of(cls, spec: NormSpec, starts_at: float | None) -> Convention:
        """The convention in a spec."""
        return cls(
            kind=spec.kind,
            has_weight=spec.has_weight,
            has_bias=spec.has_bias,
            weight_offset=spec.weight_offset,
            rounding=spec.rounding,
            gain_dtype=spec.gain_dtype,
            starts_at=starts_at,
        )


@cache
def table() -> dict[str, tuple[Convention, ...]]:
    """Model type to the conventions found in its published code."""
    text = (resources.files("normkit.audit.rules") / TABLE).read_text(encoding="utf-8")
    return {name: tuple(Convention(**row) for row in rows) for name, rows in json.loads(text).items()}


def published(config: Mapping[str, Any], spec: NormSpec) -> list[Convention]:
    """The family's conventions for norms of this kind, with or without gain as this one; none if it is not known.

    Of a model with several parts every part's family must be known, since the norm may be any part's. The whole's own
    need not be, if its parts' are.
    """
    parts = {
        str(part["model_type"]) for part in config.values() if isinstance(part, Mapping) and part.get("model_type")
    }
    if not parts.issubset(table()):
        return []
    types = parts | ({str(config["model_type"])} if config.get("model_type") else set())
    rows = [row for name in types for row in table().get(name, ())]
    return [row for row in rows if row.kind == spec.kind and row.has_weight == spec.has_weight]


def measure(names: Iterable[str], progress: Callable[[str], None] = lambda _: None) -> dict[str, list[dict[str, Any]]]:
    """Audit small models of some types, as transformers builds them; types that do not run are left out."""
    from normkit.audit import AuditError, audit
    from normkit.audit.load import ModelError, from_config
    from normkit.audit.shallow import shallow

    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        progress(name)
        try:
            loaded = from_config(name, shallow(name, _LAYERS))
            result = audit(loaded.model, *loaded.args, select=["misleading-name"], **loaded.kwargs)
        except (ModelError, AuditError):
            continue
        rows = {
            Convention.of(n.spec, _initial(loaded.model, n))
            for n in result.norms
            if n.spec is not None and not n.functional
        }
        if rows:
            found[name] = [asdict(row) for row in sorted(rows, key=repr)]
    return found


def _initial(model: Any, norm: NormRecord) -> float | None:
    """What the model's own initialization puts into a norm's stored gain."""
    path = norm.parameters.get("weight")
    if path is None or norm.module is None:
        return None
    module = copy.deepcopy(norm.module).to_empty(device="cpu")
    try:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(math.nan)
            model._init_weights(module)
        gain = module.get_parameter(path).detach()
    except AttributeError:  # the model initializes in another way, or the gain is a buffer
        return None
    return float(gain.flatten()[0]) if bool((gain == gain.flatten()[0]).all()) else None


def main() -> None:
    """Measure every architecture that transformers has and write the table."""
    from pathlib import Path

    from normkit.audit.load import transformers

    rows = measure(sorted(transformers().CONFIG_MAPPING.keys()), progress=print)
    lines = [f"  {json.dumps(name)}: {json.dumps(conventions)}" for name, conventions in rows.items()]
    Path(__file__).with_name(TABLE).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
