"""A module as a black box: a private copy on the CPU that can be called with chosen inputs and parameters.

Everything that could disturb the original or the process is kept out here, so that the measurements can treat the
module as a pure function: the copy has no hooks and its own tensors (materialized where the original is on the meta
device), and global state that a forward may change is put back.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.audit.trace.graph import is_freed

Key = int | str
"""An argument: its position, or its keyword."""

LARGE = 4096.0
"""An input scale at which an eps of ordinary size is invisible (1e-2 adds 1e-9), and nothing overflows."""

_HOOK_TABLES = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_called")))
_MANY_TENSORS = 24


class NotANorm(Exception):
    """The module does something that no normalization does, or cannot be run; the message says what."""


class OtherStatistic(NotANorm):
    """It divides by a statistic that no NormSpec has."""

    def __init__(self, message: str, statistic: str) -> None:
        super().__init__(message)
        self.statistic = statistic


@dataclass(eq=False)
class Slot:
    """One floating-point tensor that the copy holds: a parameter, a buffer, or a plain attribute."""

    name: str
    tensor: Tensor
    holder: Literal["parameter", "buffer", "attribute"]
    persistent: bool
    known: bool
    """False where the original has no values (meta device)."""
    base: Tensor = field(default_factory=lambda: torch.empty(0))
    """The float32 values used while probing."""
    assumed: bool = False
    """True once an unknown scalar was given a value by convention."""

    def set(self, value: Tensor | float) -> None:
        """Overwrite the copy's tensor."""
        if isinstance(value, Tensor):
            self.tensor.copy_(value.reshape(self.tensor.shape))
        else:
            self.tensor.fill_(value)

    def reset(self) -> None:
        self.tensor.copy_(self.base)

    @property
    def constant(self) -> bool:
        """A single number that no checkpoint holds: part of the code rather than of the weights."""
        return self.tensor.numel() == 1 and not self.persistent


@contextmanager
def restored() -> Generator[None]:
    """Put back what a foreign forward may change: random states, default dtype, threads, grad mode."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    cuda_state = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state_all(cuda_state)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)


@contextmanager
def undisturbed() -> Generator[None]:
    """For probing: plain eager float32 on the CPU, on one thread; see `restored` for what is put back."""
    with restored(), ExitStack() as stack:
        if torch.get_default_dtype() != torch.float32:
            torch.set_default_dtype(torch.float32)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # probes are small: waking threads costs more than it saves
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if "torch._dynamo" in sys.modules:  # nothing can be compiled without it, and importing it is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor, Literal["parameter", "buffer", "attribute"], bool]]:
    """(name, tensor, holder, whether a checkpoint holds it) of every tensor in the tree, each once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        lead = f"{prefix}." if prefix else ""
        hidden = getattr(part, "_non_persistent_buffers_set", set())
        found: list[tuple[str, Any, Literal["parameter", "buffer", "attribute"], bool]] = [
            *((n, t, "parameter", True) for n, t in part.named_parameters(recurse=False)),
            *((n, t, "buffer", n not in hidden) for n, t in part.named_buffers(recurse=False)),
            *((n, t, "attribute", False) for n, t in vars(part).items() if isinstance(t, Tensor)),
        ]
        for name, tensor, holder, persistent in found:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield lead + name, tensor, holder, persistent


def has_values(tensor: Tensor) -> bool:
    """Whether numbers can be read from it: not on meta, no fake or sharded subclass, its memory not freed."""
    plain = type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, nn.Parameter | nn.Buffer)
    wrapped = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__  # a sharded parameter is both
    return plain and not wrapped and not tensor.is_meta and tensor.layout is torch.strided and not is_freed(tensor)


def _detached(tensor: Tensor) -> Tensor:
    """A CPU tensor of its own with the same values, floating point in float32; zeros where there are no values."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if has_values(tensor):
        value = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
    else:
        value = torch.zeros(tuple(tensor.shape), dtype=dtype, device="cpu")
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value


def _holds_a_module(function: object) -> bool:
    cells = getattr(function, "__closure__", None) or ()
    return any(isinstance(getattr(c.cell_contents, "__self__", c.cell_contents), nn.Module) for c in cells)


def private_copy(module: nn.Module, detached: Callable[[Tensor], Tensor] = _detached) -> nn.Module:
    """A deep copy that shares nothing with the original: no hooks, its own tensors, in eval mode.

    Args:
        module: what to copy.
        detached: makes a tensor's copy.

    Raises:
        NotANorm: it holds parameters that are not initialized yet.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name in _HOOK_TABLES:
            table = vars(part).get(name)
            if isinstance(table, dict):  # a hook may hold a whole tracer, or the whole model
                memo[id(table)] = type(table)()
    for _, tensor, _, _ in tensors_of(module):
        if nn.parameter.is_lazy(tensor):
            raise NotANorm("its parameters are not initialized yet")
        memo[id(tensor)] = detached(tensor)
    try:
        twin = copy.deepcopy(module, dict(memo))
    except Exception:  # a lock, a stream, a generator: share what cannot be copied
        twin = _copy_what_can_be(module, memo)
    for part in twin.modules():
        own = vars(part).get("forward")
        if own is not None and _holds_a_module(own) and type(part).forward is not nn.Module.forward:
            del part.__dict__["forward"]  # a wrapper put on the instance, bound to the original
    return twin.eval()


def _copy_what_can_be(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    twin = object.__new__(type(module))  # a class may have a __new__ of its own (fully_shard's does)
    memo[id(module)] = twin
    for name, value in vars(module).items():
        if name == "_modules":
            children = {n: None if c is None else _copy_what_can_be(c, memo) for n, c in value.items()}
            twin.__dict__[name] = type(value)(children)
            continue
        try:
            twin.__dict__[name] = copy.deepcopy(value, memo)
        except Exception:
            twin.__dict__[name] = value
    return twin


class Probe:
    """The copy with its arguments: a function of ``x`` alone, once the other arguments have their place.

    Args:
        module: the module to copy.
        args: example positional arguments; tensors may lie on the meta device.
        kwargs: example keyword arguments.

    Raises:
        NotANorm: no floating-point tensor goes in, or a tensor it holds dwarfs what goes in.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.examples: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
        self.inputs: list[Key] = [
            k for k, v in self.examples.items() if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 0
        ]
        if not self.inputs:
            raise NotANorm("no floating-point tensor goes in")
        _refuse_large(module, max(self.examples[k].numel() for k in self.inputs), len(self.inputs))
        self.unknown = {name for name, t, _, _ in tensors_of(module) if not has_values(t)}
        self.module = private_copy(module)
        self.modes = [(part, was.training) for part, was in zip(self.module.modules(), module.modules(), strict=False)]
        self.generator = torch.Generator().manual_seed(20240229)
        self.values: dict[Key, Any] = {k: self._stand_in(v) for k, v in self.examples.items() if k not in self.inputs}
        self.x_key: Key = self.inputs[0]
        self.second: Key | None = None
        self.second_value: Tensor | float = 0.0
        self.binding: Any = None
        self.slots: list[Slot] = []
        self._scan()

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if value.is_floating_point():
            return self.random(tuple(value.shape))
        if has_values(value):
            return value.detach().cpu().clone()
        return torch.ones(tuple(value.shape), dtype=value.dtype, device="cpu")

    def random(self, shape: Sequence[int]) -> Tensor:
        """Seeded normal numbers with a mean that is not zero, so that removing it shows."""
        return torch.randn(tuple(shape), generator=self.generator) + 0.5

    def spread(self, shape: Sequence[int]) -> Tensor:
        """Seeded numbers none of which is near zero, so that each output shows what changes it."""
        sign = torch.where(torch.rand(tuple(shape), generator=self.generator) < 0.3, -1.0, 1.0)
        return self.uniform(shape) * sign

    def uniform(self, shape: Sequence[int], low: float = 0.5, high: float = 1.5) -> Tensor:
        """Seeded positive numbers: fit for a gain, a bias and a variance alike."""
        return torch.rand(tuple(shape), generator=self.generator) * (high - low) + low

    def _scan(self) -> None:
        known = {id(s.tensor) for s in self.slots}
        for name, tensor, holder, persistent in tensors_of(self.module):
            if id(tensor) in known or not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            slot = Slot(name, tensor, holder, persistent, name not in self.unknown)
            single = tensor.numel() == 1
            keep = single and slot.known and bool(tensor != 0) and bool(torch.isfinite(tensor))
            slot.base = tensor.detach().clone() if keep else self.uniform(tensor.shape)
            if sum(n > 1 for n in tensor.shape) > 1:
                # as a trained matrix would be: a positive one is nearly of rank one, a large one saturates a softmax
                slot.base *= self.uniform(tensor.shape, -1, 1).sign() * (tensor.shape[0] / tensor.numel()) ** 0.5
            slot.reset()
            self.slots.append(slot)
        if len(self.slots) > _MANY_TENSORS:
            raise NotANorm(f"it holds {len(self.slots)} tensors, more than any normalization")

    def reset(self) -> None:
        """Every slot back to its probing values."""
        for slot in self.slots:
            slot.reset()

    def __call__(self, x: Tensor, second: Tensor | float | None = None) -> Tensor:
        """The output for ``x``, as the copy gives it (dtype included).

        Raises:
            NotANorm: it raises, or gives no tensor of x's shape, dims flattened together aside.
        """
        for key in self.inputs:
            if key not in (self.x_key, self.second) and key not in self.values:
                self.values[key] = self._stand_in(self.examples[key])
        values = dict(self.values)
        values[self.x_key] = x.clone()  # a forward may write into its input
        if self.second is not None:
            other = self.second_value if second is None else second
            values[self.second] = other.clone() if isinstance(other, Tensor) else torch.full_like(x, other)
        try:
            out = self.module(
                *(values[k] for k in sorted(k for k in values if isinstance(k, int))),
                **{k: v for k, v in values.items() if isinstance(k, str)},
            )
        except (Exception, SystemExit) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise NotANorm(f"it cannot be run: {type(error).__name__}: {first[:160]}") from error
        if isinstance(out, tuple | list) and out:
            out = out[0]
        if not isinstance(out, Tensor) or not out.is_floating_point():
            raise NotANorm("it returns no floating-point tensor")
        if out.shape != x.shape and merged(x.shape, out.shape):
            out = out.reshape(x.shape)
        if out.shape != x.shape:
            raise NotANorm(f"its output has shape {tuple(out.shape)}, its input {tuple(x.shape)}")
        return out.detach()

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether an input of this shape runs and gives the same shape."""
        try:
            return bool(torch.isfinite(self(self.random(shape), 1.0)).any())
        except NotANorm:
            return False

    def settle(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The first of the shapes that runs; then look again for tensors that the first call created.

        Raises:
            NotANorm: none runs, or two equal calls differ.
        """
        refusal = NotANorm("no input shape to try")
        for shape in shapes:
            x = self.random(shape)
            try:
                self(x)
                self._scan()
                first, again = self(x), self(x)
            except NotANorm as error:
                refusal = error
                continue
            if not torch.equal(first.nan_to_num(), again.nan_to_num()):
                raise NotANorm("two equal calls give different outputs")
            return shape
        raise refusal

    @contextmanager
    def training(self) -> Generator[None]:
        """The copy in training mode, with the slots put back afterwards."""
        counters = [(t, t.clone()) for _, t, _, _ in tensors_of(self.module) if not t.is_floating_point()]
        self.module.train()
        try:
            yield
        finally:
            self.module.eval()
            self.reset()
            for tensor, value in counters:
                tensor.copy_(value)

    @contextmanager
    def as_found(self) -> Generator[None]:
        """The copy with each part in the mode in which the original was found."""
        for part, mode in self.modes:
            part.training = mode
        try:
            yield
        finally:
            self.module.eval()
            self.reset()

    @contextmanager
    def parameters_in(self, dtype: torch.dtype) -> Generator[None]:
        """Every floating-point tensor of the copy in another dtype."""
        try:
            for slot in self.slots:
                slot.tensor.data = slot.base.to(dtype)
            yield
        finally:
            for slot in self.slots:
                slot.tensor.data = slot.base.clone()

    def shapes_to_try(self) -> list[tuple[int, ...]]:
        """Shapes like the example's, the smallest first: dims that hold features keep their size."""
        example = tuple(self.examples[self.x_key].shape)
        if any(isinstance(v, Tensor) and v.dim() > 0 for k, v in self.examples.items() if k not in self.inputs):
            return [example]  # a mask or an index fits this shape only
        if any(k not in (self.x_key, self.second) for k in self.inputs):
            return [example]  # so does a third tensor, and operators exist that write out of bounds if it does not
        sizes = {n for s in self.slots for n in s.tensor.shape if n > 1}
        kept = [n in sizes or d == len(example) - 1 for d, n in enumerate(example)]
        shapes = [_shrink(example, kept)]
        if len(example) > 2:
            shapes.append(_shrink(example, [k or d == 1 for d, k in enumerate(kept)]))
        shapes.append((3, *example[1:]) if len(example) > 1 else example)
        shapes.append(example)
        return list(dict.fromkeys(shapes))


def merged(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether one shape becomes another where neighbouring dims are flattened together, leading ones or trailing ones.

    Heads are flattened so behind a norm of each head.
    """
    gone = len(shape) - len(other)
    return (
        len(other) > 1
        and gone > 0
        and math.prod(shape) == math.prod(other)
        and (tuple(shape[: len(other) - 1]) == tuple(other[:-1]) or tuple(shape[gone + 1 :]) == tuple(other[1:]))
    )


def _shrink(shape: tuple[int, ...], kept: list[bool]) -> tuple[int, ...]:
    """Small, pairwise different sizes (so that a tensor's place can be told) for the dims that hold no features."""
    if len(shape) == 1:
        return shape
    wide = math.prod(n for n, k in zip(shape, kept, strict=True) if k) > 1024
    small = iter([2, 2, 3, 2] if wide else [3, 5, 4, 7])
    new = []
    for d, (n, keep) in enumerate(zip(shape, kept, strict=True)):
        if keep and d > 0:
            new.append(n)
        elif d == 0 or n > (16 if d == 1 and not wide else 4 if wide else 8) or n == 1:
            new.append(next(small, 2))
        else:
            new.append(n)
    return tuple(new)


def _refuse_large(module: nn.Module, elements: int, inputs: int) -> None:
    """A gain or a bias is never larger than what it multiplies: do not copy a matrix to find that out.

    With a second input (a condition) a projection of moderate size may be part of the norm.
    """
    limit = max(elements, 64) if inputs == 1 else max(elements, 2**22)
    for count, (name, tensor, _, _) in enumerate(tensors_of(module), 1):
        if count > 2 * _MANY_TENSORS:
            raise NotANorm(f"it holds more than {2 * _MANY_TENSORS} tensors, more than any normalization")
        if nn.parameter.is_lazy(tensor):
            raise NotANorm("its parameters are not initialized yet")
        if tensor.numel() > limit:
            raise NotANorm(f"{name} has {tensor.numel()} elements, more than its input")
