"""`identify` on every module of the labelled architectures: their norms field by field, and nothing else as a norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normkit import identify
from tests.zoo import ROUNDING, ZOO, build

Calls = dict[str, tuple[nn.Module, Any, Any]]


def _calls(model: nn.Module, inputs: dict[str, Any]) -> Calls:
    """The first call of every module."""
    calls: Calls = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, (module, args, kwargs))

        return hook

    handles = [m.register_forward_pre_hook(note(n), with_kwargs=True) for n, m in model.named_modules() if n]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return calls


def _wrong(label: dict[str, Any], found: Any) -> list[str]:
    spec = found.spec
    if spec is None:
        return [f"no spec: {found.reason}"]
    gate = ("silu", "before") if "before" in label.get("gated", "") else ("silu", "after")
    right = {
        "kind": found.kind in (label["kind"], *label.get("also_kind", ())),
        "eps": abs(spec.eps - label["eps"]) <= 0.02 * label["eps"],
        "centered": spec.centered == label["centered"],
        "weight_offset": spec.weight_offset == label["weight_offset"],
        "has_weight": spec.has_weight == label["has_weight"],
        "has_bias": spec.has_bias == label["has_bias"],
        "rounding": spec.canonical() == spec.replace(rounding=ROUNDING[label["cast_order"]]).canonical(),
        "gate": spec.gate == (gate if "gated" in label else None),
        "frozen": spec.frozen == ("frozen" in label.get("axes", "")),
        "groups": (spec.axes == "features" and spec.groups > 1) == ("groups of" in label.get("axes", "") and "last" in
                                                                   label["axes"]),
        "channel_dim": "dim 1" not in label.get("axes", "") or spec.channel_dim == 1,
    }  # fmt: skip
    return [f"{field}: {found.spec}" for field, ok in right.items() if not ok]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ZOO)
def test_every_module(name: str, device: str) -> None:
    entry = build(name)
    labels = {module: label for label, module, _ in entry.labels}
    calls = _calls(entry.model, entry.inputs)
    assert set(labels) <= set(calls)
    wrong: list[str] = []
    for module_name, (module, args, kwargs) in calls.items():
        if ".parametrizations." in module_name:
            continue  # a parametrization normalizes weights, and says so
        if device == "meta":
            if module_name not in labels and sum(p.numel() for p in module.parameters()) > 50_000:
                continue
            module = copy.deepcopy(module).to("meta")
            args, kwargs = tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, (args, kwargs))
        found = identify(module, *args, **kwargs)
        if module_name in labels:
            wrong += [f"{module_name} {fault}" for fault in _wrong(labels[module_name], found)]
        elif found.kind != "none":
            wrong.append(f"{module_name} is no norm: {found}")
    assert wrong == []
