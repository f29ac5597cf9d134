"""convert_sync_batchnorm and its inverse: between batch norms of one process and of a group."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from normkit.nn.batch import BatchNorm
from normkit.nn.sync import SyncBatchNorm

_TorchBatchNorm = nn.modules.batchnorm._BatchNorm
_KNOWN = (_TorchBatchNorm.forward, nn.SyncBatchNorm.forward, BatchNorm.forward)
_DEFAULTS = {
    "weight_offset": 0.0,
    "rounding": "after_gain",
    "channel_dim": 1,
    "single": "error",
    "skip_nonfinite": False,
}


def convert_sync_batchnorm(
    module: nn.Module, process_group: Any = None, *, unknown: Literal["error", "keep"] = "error"
) -> nn.Module:
    """Turn every batch norm of a model, torch's or normkit's, into `normkit.nn.SyncBatchNorm`.

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias`` stays what is computed; mean and var are
    over the group. Parameters and buffers are the same objects afterwards (an optimizer need not be rebuilt), and
    ``training``, dtype, device, hooks with their handles and all other attributes stay.

    Args:
        module: the model. Children are replaced in place.
        process_group: who shares statistics; None is the default group.
        unknown: what to do with a subclass of a batch norm that has a forward of its own (an activation fused in, for
            example), which a conversion would drop: ``"error"``, or ``"keep"`` it as it is.

    Returns:
        ``module``, or what replaces it if it is a batch norm itself.

    Raises:
        ValueError: such a subclass, by name, under ``unknown="error"``. Nothing has been changed then.

    Differs from `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, which drops subclasses' forwards and hooks, and has no
    inverse: see `revert_sync_batchnorm`.
    """
    if unknown not in ("error", "keep"):
        raise ValueError(f"unknown must be 'error' or 'keep'; got {unknown!r}")
    if unknown == "error":
        for name, child in module.named_modules():
            if isinstance(child, _TorchBatchNorm) and not _is_known(child):
                raise ValueError(
                    f"{name or 'module'} is a {type(child).__name__}, a batch norm with a forward of its own that "
                    "SyncBatchNorm would drop; convert it by hand, or leave it with unknown='keep'"
                )
    return _replace(module, lambda child: _to_sync(child, process_group), {})


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Turn every SyncBatchNorm of a model back into the class it came from.

    Args:
        module: the model. Children are replaced in place.

    Returns:
        ``module``, or what replaces it if it is a SyncBatchNorm itself. One that was never converted (torch's own
        included) becomes `normkit.nn.BatchNorm`. Everything stays that `convert_sync_batchnorm` keeps.

    Differs from `torch.nn`, which has no such function.
    """
    return _replace(module, _from_sync, {})


def _is_known(module: nn.Module) -> bool:
    return type(module).forward in _KNOWN


def _replace(module: nn.Module, convert: Any, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    new = done[id(module)] = convert(module)
    for name, child in module._modules.items():
        if child is not None:
            new._modules[name] = _replace(child, convert, done)
    return new


def _transplant(module: nn.Module, cls: type[nn.Module], changes: dict[str, Any]) -> nn.Module:
    """The same insides under another class."""
    new = cls.__new__(cls)
    new.__dict__.update(module.__dict__)
    for name, value in changes.items():
        new.__dict__[name] = value
    return new


def _to_sync(module: nn.Module, process_group: Any) -> nn.Module:
    if not isinstance(module, _TorchBatchNorm) or not _is_known(module) or isinstance(module, nn.LazyBatchNorm1d):
        return module
    if isinstance(module, SyncBatchNorm):
        return _transplant(module, type(module), {"process_group": process_group})
    changes = {name: value for name, value in _DEFAULTS.items() if name not in module.__dict__}
    origin = BatchNorm if isinstance(module, nn.SyncBatchNorm) else type(module)
    return _transplant(module, SyncBatchNorm, {**changes, "process_group": process_group, "local_class": origin})


def _from_sync(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.SyncBatchNorm):
        return _transplant(module, BatchNorm, dict(_DEFAULTS))
    if not isinstance(module, SyncBatchNorm):
        return module
    new = _transplant(module, module.local_class, {})
    gone = ["process_group", "local_class"]
    if not issubclass(module.local_class, BatchNorm):
        gone += _DEFAULTS
    for name in gone:
        new.__dict__.pop(name, None)
    return new
