"""What a swapped norm computes, from which of its tensors and arguments: all that its new forward needs to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit import ops
from normkit.audit import Identification
from normkit.functional.batch import holds_one, store
from normkit.functional.evaluate import add_and_compute, compute, evaluate, fused_may_run, kernels_take, needs_gradient
from normkit.functional.running import advance, moments
from normkit.ops import fused
from normkit.reference import normalize
from normkit.spec import NormSpec

HALF = (torch.float16, torch.bfloat16)
_EMPTY = inspect.Parameter.empty
_SCALAR = (bool, int, float, str, type(None))
_TORCHS = frozenset(vars(nn.Module()))  # its mode, and what registering hooks and compiling set


@dataclass(frozen=True)
class Arguments:
    """How a forward is called: its parameters' names (without self), and which of them are the input and the gate."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    input: int
    gate: int | None = None

    def pick(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """(input, gate) of a call; None where anything else is given."""
        if len(args) > len(self.names):
            return None
        given = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.names or name in given:
                return None
            given[name] = value
        x = gate = None
        for place, (name, default) in enumerate(zip(self.names, self.defaults, strict=True)):
            if place == self.input:
                x = given.get(name)
            elif place == self.gate:
                gate = given.get(name)
            elif name in given and given[name] is not default:
                return None
        return x, gate


def arguments_of(forward: Callable[..., Any], found: Identification) -> Arguments | None:
    """Where input and gate are in a forward's signature; None where it has no plain one."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in plain]
    names = tuple(p.name for p in positional)

    def place(key: int | str | None) -> int | None:
        if isinstance(key, str):
            return names.index(key) if key in names else None
        return key if key is not None and key < len(names) else None

    x, gate = place(found.input), place(found.gate)
    if x is None or (found.gate is not None and gate is None):
        return None
    return Arguments(names, tuple(p.default for p in positional), x, gate)


@dataclass(frozen=True)
class Plan:
    """One norm's new forward. Two modules of one class with equal plans share their new class."""

    spec: NormSpec
    """What the module computes."""
    kernel: NormSpec
    """What the kernel is asked for."""
    arguments: Arguments
    weight: str | None = None
    bias: str | None = None
    running_mean: str | None = None
    running_var: str | None = None
    counter: str | None = None
    """The buffer that counts batches."""
    constants: tuple[tuple[str, Any], ...] = ()
    """The module's plain attributes when it was proven."""
    modes: tuple[bool, ...] = (False, True)
    """The values of ``training`` that it was proven in. In others, and wherever else the proof does not reach, the
    module's own forward runs."""
    literal: bool = True
    """Whether the kernel is asked for the spec itself; else for its form that rounds once: the same in a wide dtype."""
    keeps_layout: bool = False
    """Whether the result has its input's order of dims in memory (eager operators) rather than its own (kernels)."""
    half: bool = True
    """Whether it was proven in half precision."""
    autocast: bool = True
    """Whether it was proven under autocast."""
    inference: bool = True
    gradient: bool = True
    """Whether the new forward is taken without and with a gradient to record: where it is no slower."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def replace(self, **changes: Any) -> Plan:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def stateful(self) -> bool:
        """Whether it keeps running statistics."""
        return self.spec.running is not None

    def tensors(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(weight, bias, running_mean, running_var) of a module."""
        return (
            _read(module, self.weight),
            _read(module, self.bias),
            _read(module, self.running_mean),
            _read(module, self.running_var),
        )

    def shape(self, t: Tensor | None, x: Tensor) -> Tensor | None:
        """A parameter as `normkit.functional` wants it: a module may store [C, 1, 1] for [C]."""
        if t is None or self.spec.weight_shape == "per_head":
            return t
        if self.spec.weight_shape == "scalar":
            return t if t.dim() <= 1 else t.reshape(1)
        n = len(self.spec.channel_dim) if isinstance(self.spec.channel_dim, tuple) else 1
        return t if t.dim() == n else t.reshape(x.shape[-n:] if n > 1 else (-1,))

    def run(self, module: nn.Module, x: Tensor, gate: Tensor | None) -> Tensor | None:
        """The norm by normkit; None where the module's own forward must run."""
        weight, bias, mean, variance = self.tensors(module)
        spec = self.kernel
        if (weight is not None) != spec.has_weight or (bias is not None) != spec.has_bias or x.numel() == 0:
            return None
        if not self.literal and not self._alike(x, weight, bias, mean, variance):
            return None
        if not x.is_cpu:
            return self._elsewhere(module, x, gate)
        if not kernels_take(x, weight, bias, gate, mean, variance):
            return None
        weight, bias = self.shape(weight, x), self.shape(bias, x)
        if spec.running is None and not spec.frozen:
            if gate is not None and gate.dtype != x.dtype and x.dtype not in HALF:
                gate = gate.to(x.dtype)  # exact, and the kernels take one dtype
            order = self._order(x, gate)
            if order is None:
                return compute(x, spec, weight, bias, gate=gate)
            inverse = sorted(range(x.dim()), key=lambda d: order[d])
            return compute(x.permute(order), spec, weight, bias).permute(inverse)
        mean, variance = self.shape(mean, x), self.shape(variance, x)
        if spec.frozen or not (module.training or mean is None):
            if variance is None:
                return None
            if mean is None:
                mean = torch.zeros_like(variance)
            return compute(x, spec, weight, bias, gate=gate, running_mean=mean, running_var=variance)
        if gate is not None or holds_one(x, spec, None):
            return None
        return self._train(module, x, weight, bias, mean, variance)

    def add(self, module: nn.Module, a: Tensor, b: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor] | None:
        """(the norm of ``a + b``, the sum) by one operator; None where there is none for it.

        ``spec`` is the kernel's, with its output in the input's dtype.
        """
        weight, bias, _, _ = self.tensors(module)
        if self.kernel.output_dtype != "input" and weight is not None and weight.dtype != a.dtype:
            return None
        if (weight is not None) != spec.has_weight or (bias is not None) != spec.has_bias or a.numel() == 0:
            return None
        if self.stateful or spec.frozen or not (a.is_contiguous() and b.is_contiguous()):
            return None
        if not self.literal and not self._alike(a, weight, bias):
            return None
        return add_and_compute(a, b, spec, self.shape(weight, a), self.shape(bias, a))

    def _order(self, x: Tensor, gate: Tensor | None) -> list[int] | None:
        """The dims of x from the widest stride to the narrowest, features last, where the result must lie like x.

        (A view of a permuted result must go on working: attention norms its heads transposed.)
        """
        if not self.keeps_layout or gate is not None or x.is_contiguous() or self.spec.weight_shape == "per_head":
            return None
        order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
        return order if order[-1] == x.dim() - 1 else None

    def _elsewhere(self, module: nn.Module, x: Tensor, gate: Tensor | None) -> Tensor | None:
        """By torch's fused operator, on devices that only torch has kernels for, where it computes the same."""
        if gate is not None or (self.stateful and module.training) or not fused_may_run(x):
            return None
        weight, bias, mean, variance = (self.shape(t, x) for t in self.tensors(module))
        return fused.evaluate(x, self.kernel, weight, bias, mean, variance)

    def _alike(self, x: Tensor, *others: Tensor | None) -> bool:
        """Whether rounding on the way does not show: one dtype, and (but for what was proven) no half precision."""
        if any(t is not None and t.dtype != x.dtype for t in others):
            return False
        return self.half or x.dtype not in HALF

    def _train(
        self,
        module: nn.Module,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
    ) -> Tensor:
        """Normalize by the batch's statistics, and move the running ones."""
        y, found = evaluate(x, self.kernel, weight, bias)
        assert found is not None
        with torch.no_grad():
            counter = _read(module, self.counter)
            if counter is not None:
                counter.add_(1)
            momentum = self.spec.running
            assert momentum is not None
            step = 1 / counter.to(torch.float32) if isinstance(momentum, str) else momentum  # type: ignore[union-attr]
            if mean is not None and variance is not None:
                new_mean, new_var, _ = advance(mean, variance, moments(found, self.kernel, x.dim()), step)
                store(mean, new_mean)
                store(variance, new_var)
        return y

    def exact(self, module: nn.Module, x: Tensor, gate: Tensor | None) -> Tensor:
        """The norm by its definition in float64."""
        weight, bias, mean, variance = (
            None if t is None else self.shape(t, x).double()  # type: ignore[union-attr]
            for t in self.tensors(module)
        )
        stored = self.spec.frozen or (self.spec.running is not None and not module.training)
        if stored and mean is None and variance is not None:
            mean = torch.zeros_like(variance)
        spec = self.spec.canonical(float32_only=True)
        return normalize(
            x.double(),
            spec,
            weight,
            bias,
            gate=None if gate is None else gate.double(),
            running_mean=mean if stored else None,
            running_var=variance if stored else None,
        )

    def records(self, module: nn.Module, *inputs: Tensor) -> bool:
        """Whether autograd would record the call."""
        return needs_gradient(*inputs, _read(module, self.weight), _read(module, self.bias))

    def __reduce__(self) -> tuple[Any, ...]:
        return _plan, ({f.name: getattr(self, f.name) for f in fields(self)},)


def _plan(values: dict[str, Any]) -> Plan:
    return Plan(**values)


def has_operator(spec: NormSpec, *, stored: bool) -> bool:
    """Whether the native operators have one for a spec (with stored statistics, also for those)."""
    if stored:
        return ops.given(spec) is not None and (spec.frozen or ops.measuring(spec) is not None)
    return ops.operator(spec) is not None


def constants_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain values among a module's attributes, but for those of every module: what its forward may read."""
    own = ((n, v) for n, v in vars(module).items() if n not in _TORCHS and type(v) in _SCALAR)
    return tuple(own)


def _read(module: Any, path: str | None) -> Tensor | None:
    if path is None:
        return None
    for part in path.split("."):
        module = getattr(module, part)
    return module
