"""Another residual placement for a normkit Transformer, with the weights that both wirings have."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from normkit.convert.edit import HOOKS, Editor
from normkit.convert.receipt import Change, Refusal
from normkit.placement import Placement
from normkit.residual import Residual, Transformer
from normkit.residual.branch import InnerNorm
from normkit.residual.transformer import TransformerLayer

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_STACKS = ("encoder", "stack")


def change_placement(
    editor: Editor, model: Transformer, to: str | Placement
) -> tuple[list[Change], list[Refusal], list[str]]:
    """Rewire a Transformer in place.

    Raises:
        ValueError: the placement needs a constant, or a final norm, that the config does not have.
    """
    config = replace(model.config, placement=to)
    like = model.embed.weight
    with torch.random.fork_rng(devices=[]):
        fresh = Transformer(config).to(device=like.device, dtype=like.dtype)
    before, after = _wirings(model), _wirings(fresh)
    old, new = _homes(model), _homes(fresh)
    kept: set[str] = set()
    for home, (owner, key) in new.items():
        found = old.get(home)
        if found is None:
            continue
        held = found[0]._parameters[found[1]]
        own = owner._parameters[key]
        if held is not None and own is not None and held.shape == own.shape:
            owner._parameters[key] = held
            kept.add(home)
    _carry_modules(model, fresh)
    for name in _STACKS:
        module = getattr(fresh, name)
        if module is not None:
            editor.set_module(name, module)
    editor.set_attribute(model, "config", config)
    changed = [
        Change(name=name, what=_said(before.get(name), wiring))
        for name, wiring in after.items()
        if before.get(name) != wiring
    ]
    changed += [Change(name=name, what="gone: its branch is part of another") for name in before if name not in after]
    notes = [
        f"{label}: {', '.join(dict.fromkeys(re.sub(NUMBER, '*', home) for home in sorted(homes)))}"
        for label, homes in (("new parameters", new.keys() - kept), ("parameters given up", old.keys() - kept))
        if homes
    ]
    return changed, [], notes


def _said(before: Placement | None, after: Placement) -> str:
    if before is None:
        return f"new: {after.name}"
    if before.name == after.name:
        return f"{after.name}, with other norms or constants inside"
    return f"{before.name} to {after.name}"


def _wirings(model: Transformer) -> dict[str, Placement]:
    return {name: m.placement for name, m in model.named_modules() if isinstance(m, Residual)}


def _homes(model: Transformer) -> dict[str, tuple[nn.Module, str]]:
    """Each parameter of the stacks by what it is, wherever the wiring keeps it.

    A projection behind an inner norm has its plain name; a parallel block's feed-forward layer that of the branch it
    would have. A learned branch scale is another thing for another wiring.
    """
    moved: dict[str, str] = {}
    scales: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, InnerNorm):
            moved[f"{path}.projection"] = path
            moved[f"{path}.norm"] = f"{path}.inner_norm"
        elif isinstance(module, TransformerLayer) and module.ffn is None:
            moved[f"{path}.attention.parallel"] = f"{path}.ffn.sublayer"
        if isinstance(module, Residual):
            scales[path] = module.placement.branch_scale_kind
    homes: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        if path.split(".")[0] not in _STACKS:
            continue
        for key in module._parameters:
            if module._parameters[key] is None:
                continue
            home = f"{_home(path, moved)}.{key}"
            if key == "branch_scale":
                home += f" ({scales[path]})"
            homes.setdefault(home, (module, key))
    return homes


def _home(path: str, moved: dict[str, str]) -> str:
    for start in sorted(moved, key=len, reverse=True):
        if path == start or path.startswith(f"{start}."):
            path = moved[start] + path[len(start) :]
    return path


def _carry_modules(model: Transformer, fresh: Transformer) -> None:
    """Mode and hooks of every module that both wirings have."""
    old = dict(model.named_modules())
    fresh.train(model.training)
    for path, module in fresh.named_modules():
        was = old.get(path)
        if was is None or type(was) is not type(module) or path.split(".")[0] not in _STACKS:
            continue
        module.training = was.training
        for name in HOOKS:
            if name in was.__dict__:
                module.__dict__[name] = was.__dict__[name]
