"""Modules that only wrap another one, for compiling, sharding, replicating, checkpointing or adapting it.

They are no part of an architecture: an audit names what they hold as if they were not there. By behaviour a wrapper is
no different from a module of the user's own that holds one other, so they are known by their classes, none of which is
imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def _adapter(holder: str) -> Callable[[nn.Module], str]:
    """Where a module that keeps one copy for each adapter holds the active one."""

    def path(wrapper: nn.Module) -> str:
        original = "base_layer" if "base_layer" in wrapper._modules else "original_module"
        active: Any = getattr(wrapper, "active_adapters", ())
        copies = wrapper.get_submodule(holder)._modules
        if getattr(wrapper, "disable_adapters", False) or getattr(wrapper, "merged", False):
            return original
        return next((f"{holder}.{name}" for name in active if name in copies), original)

    return path


_WRAPPERS: tuple[tuple[str, str, str | Callable[[nn.Module], str]], ...] = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    ("lightning.fabric.wrappers", "_FabricModule", "_forward_module"),
    ("lightning_fabric.wrappers", "_FabricModule", "_forward_module"),
    ("peft", "PeftModel", "base_model"),
    ("peft.tuners.tuners_utils", "BaseTuner", "model"),
    ("peft.utils.other", "ModulesToSaveWrapper", _adapter("modules_to_save")),
    ("peft.tuners.ln_tuning.layer", "LNTuningLayer", _adapter("ln_tuning_layers")),
)
"""(where it is imported from, class, attribute path of the module inside)."""


def inside(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper holds; None if it is no wrapper."""
    for home, name, where in _WRAPPERS:
        wrapper = getattr(sys.modules.get(home), name, None)
        if wrapper is None or not isinstance(module, wrapper):
            continue
        found: nn.Module | None = module
        for part in (where if isinstance(where, str) else where(module)).split("."):
            found = None if found is None else found._modules.get(part)
        return found
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    while (held := inside(module)) is not None:
        module = held
    return module


def class_name(module: nn.Module) -> str:
    """The name of a module's class; of the original one where ``fully_shard`` put its own in its place."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    classes = type(module).__mro__
    if sharded is not None and sharded in classes[1:2]:
        classes = classes[2:]
    return classes[0].__name__


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`torch.nn.Module.named_modules` as if no module were wrapped: wrappers are left out, and so are their names."""
    seen: set[int] = set()
    todo = [("", model)]
    while todo:
        name, module = todo.pop()
        module = unwrapped(module)
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        lead = f"{name}." if name else ""
        todo += [(lead + key, child) for key, child in reversed(list(module.named_children()))]


def plain_submodule(model: nn.Module, name: str) -> nn.Module:
    """`torch.nn.Module.get_submodule` by a name without wrappers.

    Raises:
        AttributeError: there is none of that name.
    """
    found = unwrapped(model)
    for part in name.split(".") if name else ():
        child = getattr(found, part, None)
        if not isinstance(child, nn.Module):
            raise AttributeError(f"{type(model).__name__} has no submodule {name!r}")
        found = unwrapped(child)
    return found
