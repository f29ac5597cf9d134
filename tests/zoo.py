"""The labelled architectures as models with trained-like norm weights, and how an audit of them is scored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.audit import Audit, NormRecord
from normkit.spec import NormSpec

ZOO: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "zoo.json").read_text())
MORE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "zoo_more.json").read_text())
"""Further architectures, labelled in the same way."""
BROAD: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "zoo_broad.json").read_text())
"""Many more: vision, speech, several modalities, hybrids; ``labelled`` says whether the audit had been seen by then."""

# `cast_order` of the labels in the vocabulary of NormSpec.
ROUNDING = {
    "fp32_norm_then_cast_then_weight": "before_gain",
    "fp32_norm_then_cast_no_weight": "before_gain",
    "fp32_statistic_then_cast_then_weight": "before_gain",
    "fp32_norm_and_weight_then_cast": "after_gain",
    "torch_kernel": "after_gain",
    "input_dtype_throughout": "none",
}
FIELDS = (
    "found", "kind", "axes", "centered", "eps", "weight_offset", "has_weight", "has_bias", "rounding", "gate", "calls",
    "placement",
)  # fmt: skip


@dataclass
class Entry:
    """One architecture: the model, what to call it with, and its labels with the modules they mean."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    labels: list[tuple[dict[str, Any], str, nn.Module]]
    functional: list[dict[str, Any]]


def build(name: str, device: str = "cpu") -> Entry:
    """Build one architecture in eval mode; norm weights get seeded noise, as a trained model's would have."""
    import transformers

    data = (ZOO | MORE | BROAD)[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(data["model_type"], **data["config"])
    with torch.device(device):
        made = getattr(transformers, data["auto_class"])
        model = (made.from_config(config) if data["auto_class"].startswith("Auto") else made(config)).eval()
    labels = [(n, m, model.get_submodule(m)) for n in data["norms"] for m in n["modules"]]
    if device != "meta":
        for _, _, module in labels:
            perturb(module)
    inputs: dict[str, Any] = {k: _input(k, v, config, device) for k, v in data["inputs"].items()}
    if "use_cache" in model.forward.__code__.co_varnames:
        inputs["use_cache"] = False
    return Entry(name, model, inputs, labels, data["functional"])


@torch.no_grad()
def perturb(module: nn.Module) -> None:
    """Move a norm's parameters and running statistics to trained-like values."""
    for parameter in module.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.1)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape) + 0.5 if (buffer > 0).all() else torch.randn(buffer.shape) * 0.1)


def _input(name: str, value: dict[str, Any], config: Any, device: str) -> Tensor:
    if "values" in value:
        return torch.tensor(value["values"], device=device)
    if "mask" in name or value["dtype"] == "bool":
        return torch.ones(value["shape"], dtype=getattr(torch, value["dtype"]), device=device)
    if value["dtype"] == "int64":
        vocabulary = getattr(config, "vocab_size", None) or config.text_config.vocab_size
        ids = torch.randint(min(3, vocabulary - 1), vocabulary, value["shape"])
        if "token" in value:  # places that another modality fills
            ids[ids == value["token"]] = 4
            ids[:, 1 : 1 + value["count"]] = value["token"]
        return ids.to(device)
    return torch.randn(value["shape"]).to(device)


def score(entry: Entry, audit: Audit) -> Iterator[tuple[str, bool, str]]:
    """(field, right, what was found) for every labelled norm and field, and one "extra" for each false report.

    Norms are matched by the module object, so that names do not matter.
    """
    by_module = {id(n.module): n for n in audit.norms if not n.functional}
    for label, name, module in entry.labels:
        norm = by_module.pop(id(module), None)
        yield "found", norm is not None, name
        if norm is not None:
            for field, right in compare(label, norm).items():
                yield field, right, f"{name}: {norm.kind} {norm.placement} {norm.spec}"
    for norm in by_module.values():
        yield "extra", False, f"{norm.name}: {norm.kind} {norm.spec}"
    yield from _score_functional(entry, [n for n in audit.norms if n.functional])


def compare(label: dict[str, Any], norm: NormRecord) -> dict[str, bool]:
    """Field by field; a field that the label's form leaves void counts as right."""
    spec = norm.spec
    kinds = {label["kind"], *label.get("also_kind", ())}
    placements = {label["placement"], *label.get("also_placement", ())}
    if norm.name in label.get("last_of_stack", ()):
        placements.add("final")
    right = {
        "kind": norm.kind in kinds,
        "placement": norm.placement in placements,
        "calls": norm.calls == label["calls"],
    }
    if spec is None:
        return right if label["kind"] == "other" else right | {f: False for f in FIELDS if f not in ("found", *right)}
    wanted = spec.replace(rounding=ROUNDING[label["cast_order"]]).canonical()
    return right | {
        "axes": _axes_right(label, spec, norm.input_shape),
        "centered": spec.centered == label["centered"],
        "eps": abs(spec.eps - label["eps"]) <= 0.02 * label["eps"],
        "weight_offset": spec.weight_offset == label["weight_offset"],
        "has_weight": spec.has_weight == label["has_weight"],
        "has_bias": spec.has_bias == label["has_bias"],
        "rounding": spec.canonical().rounding == wanted.rounding,
        "gate": spec.gate == _gate(label),
    }


def _gate(label: dict[str, Any]) -> tuple[str, str] | None:
    match = re.match(r"(silu|sigmoid)\(gate\) (before|after)", label.get("gated", ""))
    return (match[1], match[2]) if match else None


def _axes_right(label: dict[str, Any], spec: NormSpec, shape: tuple[int, ...]) -> bool:
    """`axes` of the labels is prose: which dim, or groups of how many features."""
    text = label.get("axes", "")
    axes = {"layer": "features", "rms": "features", "l2": "features"}.get(label["kind"], label["kind"])
    allowed = {axes, *label.get("also_kind", ())}
    if "dim 1" in text or label["kind"] in ("batch", "group"):
        channel_right = spec.channel_dim == 1
    else:
        channel_right = spec.channel_dim in (-1, (-1,))
    size = re.match(r"groups of (\d+)", text)
    groups = shape[-1] // int(size[1]) if size else 1
    groups_right = spec.groups == groups if axes == "features" else True
    return spec.axes in allowed and channel_right and groups_right


def _score_functional(entry: Entry, found: list[NormRecord]) -> Iterator[tuple[str, bool, str]]:
    """Norms written inline: right if each labelled kind and placement is there, and no others."""
    seen = {(n.kind, n.placement) for n in found}
    wanted = [
        {(k, p) for k in (f["kind"], *f.get("also_kind", ())) for p in (f["placement"], *f.get("also_placement", ()))}
        for f in entry.functional
    ]
    for either in wanted:
        yield "functional", bool(either & seen), f"one of {sorted(either)} wanted, found {sorted(seen)}"
    for norm in found:
        if not any((norm.kind, norm.placement) in either for either in wanted):
            yield "extra", False, f"{norm.name}: {norm.kind} {norm.placement} {norm.spec}"
