"""Giving a module another forward by giving it another class, a subclass of its own, and giving it back.

Why the class: a forward bound to the instance is lost by pickle and copy, or bound to the wrong one. The subclass adds
nothing to the instance, so state_dict, hooks, names and attributes are untouched, ``isinstance`` holds, and undoing is
one assignment. It is made once for each class and plan; pickle writes those two instead of it.
"""

from __future__ import annotations

import copyreg
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.convert.swap.plan import HALF, Plan
from normkit.functional import short

_PLAN = "__normkit_plan__"
_ADD = "__normkit_add__"
_CHANGED = "__normkit_changed__"
"""Marks every class that a swap made, of norms and of blocks around them."""
_CLASSES: dict[tuple[type[nn.Module], Plan], type[nn.Module]] = {}
_autocast_enabled = torch.is_autocast_enabled
_compiling = torch.compiler.is_compiling
_traced = torch._C._is_tracing


def plan_of(module: nn.Module) -> Plan | None:
    """The plan of a swapped module; None for any other."""
    return vars(type(module)).get(_PLAN)


def adder_of(module: nn.Module) -> Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """What adds two tensors and norms the sum as a swapped module does, None where its proof does not reach."""
    return type(module).__dict__.get(_ADD)


def base_of(module: nn.Module) -> type[nn.Module]:
    """The class that a swapped module had."""
    return type(module).__bases__[0]


def swapped_class(base: type[nn.Module], plan: Plan) -> type[nn.Module]:
    """The subclass of ``base`` whose forward follows the plan."""
    key = (base, plan)
    if key not in _CLASSES:
        members = {
            _PLAN: plan,
            "forward": _forward(base.forward, plan),
            _ADD: _adder(base, plan),
            "__setattr__": _watch(base, plan),
        }
        _CLASSES[key] = subclass(base, members, swapped_class, plan)
    return _CLASSES[key]


def subclass(
    base: type[nn.Module],
    members: dict[str, Any],
    make: Callable[[type[nn.Module], Any], type[nn.Module]],
    how: Any,
    *,
    silent: bool = False,
) -> type[nn.Module]:
    """A subclass that passes for its base; pickle writes ``make(base, how)`` instead of it.

    ``silent`` makes it without calling ``__init_subclass__``: where that wraps a class's forward, say, ``members``
    has the wrapper already.
    """
    members |= {
        _CHANGED: True,
        "__reduce_ex__": _reduce(base, make, how),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    made = type(base)(base.__name__, (nn.Module if silent else base,), members)
    if silent:
        made.__bases__ = (base,)
    return made


def _forward(original: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """The forward of a plan; the original where the proof does not reach."""
    arguments, reached = plan.arguments, _reached(plan)
    single = arguments.input == 0 and arguments.gate is None and plan.spec.gate is None
    row = _row(plan)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if single and len(args) == 1 and not kwargs:
            x, gate = args[0], None
        else:
            picked = arguments.pick(args, kwargs)
            if picked is None or (picked[1] is None) != (arguments.gate is None):
                return original(self, *args, **kwargs)
            x, gate = picked
        if isinstance(x, Tensor) and reached(self, x):
            y = None if row is None else row(self, x)
            if y is None:
                y = plan.run(self, x, gate)
            if y is not None:
                return y
        return original(self, *args, **kwargs)

    forward.__doc__ = original.__doc__
    forward.__signature__ = _signature(original)  # type: ignore[attr-defined]
    return forward


def _reached(plan: Plan) -> Callable[..., bool]:
    """Whether the proof reaches a call of the norm on a tensor, or on the sum of two."""
    modes = plan.modes
    everywhere = len(set(modes)) == 2
    whole = plan.inference and plan.gradient

    def reached(self: nn.Module, x: Tensor, *others: Tensor) -> bool:
        return (
            (_compiling() or not _traced())  # torch.jit.trace cannot save what autograd records of a kernel
            and (everywhere or self.training in modes)
            and (plan.half or x.dtype not in HALF)
            and (plan.autocast or not _autocast_enabled(x.device.type))
            and (whole or (plan.gradient if plan.records(self, x, *others) else plan.inference))
        )

    return reached


def _adder(
    base: type[nn.Module], plan: Plan
) -> Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    if base.__call__ is not nn.Module.__call__ or plan.spec.gate is not None:
        return None
    reached = _reached(plan)
    spec = replace(plan.kernel, output_dtype="input")

    def add(self: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
        return plan.add(self, a, b, spec) if reached(self, a, b) else None

    return add


def _row(plan: Plan) -> Callable[[Any, Tensor], Tensor | None] | None:
    """LayerNorm and RMSNorm over the last dim in few steps: a small row costs no more than a call."""
    spec, weight_name, bias_name = plan.kernel, plan.weight, plan.bias
    usual = (
        spec.axes == "features"
        and spec.channel_dim in (-1, (-1,))
        and (spec.groups, spec.partial, spec.gate) == (1, 1.0, None)
        and (spec.statistic, spec.eps_at) == ("mean_square", "variance")
        and spec.weight_shape == "features"
        and not (spec.weight_offset != 0 and spec.gain_dtype == "input")
    )
    if not usual or weight_name is None or "." in weight_name + (bias_name or "") or not plan.literal:
        return None
    centered, eps, offset, rounding = spec.centered, spec.eps, spec.weight_offset, spec.rounding
    like_input, keeps_layout = spec.output_dtype == "input", plan.keeps_layout

    def run(module: Any, x: Tensor) -> Tensor | None:
        if keeps_layout and not x.is_contiguous():
            return None
        weight = getattr(module, weight_name)
        bias = None if bias_name is None else getattr(module, bias_name)
        if weight is None or not (like_input or weight.dtype == x.dtype) or (bias is None) != (bias_name is None):
            return None
        return short.row(centered, x, weight, bias, eps, offset, rounding)

    return run


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _reduce(base: type[nn.Module], make: Callable[..., type[nn.Module]], how: Any) -> Callable[[Any, Any], Any]:
    """Pickle and copy as the original class would, then change the class again."""

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = base.__reduce_ex__(self, protocol)  # type: ignore[arg-type]
        if isinstance(reduced, str):
            return reduced
        function, args, *rest = reduced
        args = tuple(base if a is type(self) else a for a in args)
        return (_rebuild, (make, base, how, function, *args), *rest)

    return reduce_ex


def _rebuild(
    make: Callable[..., type[nn.Module]], base: type[nn.Module], how: Any, function: Callable[..., Any], *args: Any
) -> Any:
    made = copyreg.__newobj__(*args) if function is copyreg.__newobj__ else function(*args)  # type: ignore[attr-defined]
    if type(made) is base:
        made.__class__ = make(base, how)
    return made


def _watch(base: type[nn.Module], plan: Plan) -> Callable[[Any, str, Any], None]:
    """A plain attribute that changes (an eps, a momentum) may change the norm: its own forward is then back."""
    known = dict(plan.constants)

    def setattr_(self: nn.Module, name: str, value: Any) -> None:
        if name in known and not (type(value) is type(known[name]) and value == known[name]):
            give_back(self)
            warnings.warn(
                f"{name} of a swapped {base.__name__} was set to {value!r}: it was proven with {known[name]!r}, so its "
                "own forward runs again. Swap once more to have normkit's",
                stacklevel=2,
            )
        base.__setattr__(self, name, value)

    return setattr_


def unfit(module: nn.Module, *, silent: bool = False) -> str:
    """What stands in the way of another class, made by `subclass`."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module: its class cannot be changed"
    if "forward" in vars(module):
        return "its forward was replaced on the instance: remove the wrapper, swap, and wrap again"
    if type(type(module)) is not type if silent else _acts_on_subclasses(type(module)):
        return "its class does something when a subclass of it is made (a metaclass or __init_subclass__)"
    return ""


def _acts_on_subclasses(base: type[nn.Module]) -> bool:
    """Whether making a subclass runs code of the user's, a registry say, that would then hold the swapped class."""
    makers = [type(base), next(c for c in base.__mro__ if "__init_subclass__" in vars(c))]
    return any(maker.__module__.partition(".")[0] not in sys.stdlib_module_names for maker in makers)


def give_back(module: nn.Module) -> None:
    """A swapped module's own class again."""
    module.__class__ = base_of(module)


def unswap(model: nn.Module) -> int:
    """Give every swapped module of a tree its own forward again, also in a copy or in what was unpickled.

    Args:
        model: any module.

    Returns:
        How many there were, blocks with fused sums among them. Modules whose swapped class was itself replaced
        (``fully_shard``) stay.
    """
    found = [m for m in model.modules() if _CHANGED in vars(type(m))]
    for module in found:
        give_back(module)
    return len(found)
