"""Recording one run of a model at operator level, with the module calls around it.

`trace` runs the model under a dispatch mode, so what is seen is what runs: fused, inlined or hidden inside a
container makes no difference. Three things need care and are what most of this file is about. A tensor object is not
a value: memory is reused after it is freed, and a view changes when its base is written. So values are kept by storage
(whose identity is pinned by a weak reference) and layout, with a log of writes. The model must come out as it
went in: parameters, buffers, attributes of the hooks, random state. And nothing may keep activations alive.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from normkit.audit.identify.probe import restored
from normkit.audit.trace.graph import (
    Failure,
    Guess,
    ModuleCall,
    Node,
    Opaque,
    Origin,
    Ref,
    TensorInfo,
    Trace,
    Value,
    flat_tensors,
    written_arguments,
)
from normkit.audit.trace.meta import run_on_meta
from normkit.audit.trace.source import calling_line
from normkit.audit.trace.watch import Watch
from normkit.audit.trace.wrappers import plain_modules

Layout = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
_UNDECLARED_WRITES = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
"""Operators that update running statistics (arguments 3 and 4) without saying so in their schema."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, type(...))


@dataclass(slots=True)
class _Write:
    value: int
    low: int
    high: int
    whole: bool


@dataclass(slots=True)
class _Storage:
    """The values seen in one storage: by layout, each with the number of writes it already includes."""

    pin: StorageWeakRef | Tensor  # keeps the address from being reused
    known: dict[Layout, tuple[int, int]] = field(default_factory=dict)
    writes: list[_Write] = field(default_factory=list)


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> Trace:
    """Run a model once and record every operator, the values between them and the module calls around them.

    The run is without gradients, in the model's own training mode, with the encoder fast path and compilation off
    (they hide operators). Whatever the run changes is put back: hooks, buffers, inputs, the random state.

    Args:
        model: any module, on any device, meta included.
        args, kwargs: what to call it with.
        watch: is shown the tensors of some operators as they run.

    Returns:
        A `Trace`. If the model raised, it is partial: `Trace.error` is the exception and `Trace.failures` names
        the modules in which exceptions began (also those that the model itself caught).
    """
    recorder = _Recorder(model, watch)
    args, kwargs = _with_own_objects((args, dict(kwargs or {})))
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored())
        stack.enter_context(torch.inference_mode(False))  # it hides what composite operators are made of
        stack.enter_context(torch.no_grad())
        stack.enter_context(_no_fast_path())
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices(model)))
        stack.enter_context(same_attributes(model))
        stack.enter_context(_same_gradients(model))
        stack.callback(recorder.restore)
        stack.enter_context(recorder.hooks())
        recorder.trace.inputs = recorder.register_inputs(args, kwargs)
        try:
            with recorder, torch.compiler.set_stance("force_eager"):
                output = model(*args, **kwargs)
            recorder.trace.outputs = recorder.lookup_all(output)
        except (Exception, SystemExit) as error:  # the partial trace is the result; the caller decides
            recorder.trace.error = error
            recorder.blame(error)
    recorder.close()
    return recorder.trace


def _with_own_objects(given: Any) -> Any:
    """The arguments, with a copy of every object among them that a forward may change (a cache of keys and values).

    Tensors that are arguments themselves stay: what is written into them is put back.
    """
    plain = (Tensor, nn.Module, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

    def own(value: Any) -> Any:
        if isinstance(value, plain) or callable(value):
            return value
        try:
            return copy.deepcopy(value)
        except Exception:  # a lock, a file: shared then
            return value

    return tree_map(own, given)


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


@contextlib.contextmanager
def _no_fast_path() -> Generator[None, None, None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def same_attributes(model: nn.Module) -> Generator[None, None, None]:
    """What the forward rebinds, adds or appends to is as before (in-place writes of tensors: `_Recorder.restore`)."""
    owners = [vars(m) for m in model.modules()]
    kept = [(o, dict(o)) for o in owners]
    holders = {id(v): v for o in owners for v in o.values() if isinstance(v, dict | list | set)}
    contents = [(holder, holder.copy()) for holder in holders.values()]
    try:
        yield
    finally:
        for holder, before in (*kept, *contents):
            if not _same(holder, before):
                holder.clear()
                holder.extend(before) if isinstance(holder, list) else holder.update(before)


@contextlib.contextmanager
def _same_gradients(model: nn.Module) -> Generator[None, None, None]:
    """Gradients as before, of a model that runs backward in its forward: they are laid aside for the run."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, grad in kept:
            if grad is not None:
                parameter.grad = None
        yield
    finally:
        for parameter, grad in kept:
            if parameter.grad is not grad:
                parameter.grad = grad


def _same(holder: Any, before: Any) -> bool:
    """Whether a container holds the very objects that it held before."""
    if isinstance(holder, dict):
        return holder.keys() == before.keys() and all(holder[k] is before[k] for k in before)
    return len(holder) == len(before) and all(a is b for a, b in zip(holder, before, strict=True))


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, watch: Watch | None = None) -> None:
        super().__init__()
        self.trace = Trace()
        self.model = model
        self._watch = watch
        self._storages: dict[int, _Storage] = {}
        self._stack: list[int] = []
        self._orders: dict[int, int] = {}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> (leaf, its value before the first write)
        self._protected: dict[int, Tensor] = {}
        self._blamed: set[int] = set()
        self._names: dict[int, str] = {}
        self._modules = list(plain_modules(model))
        for name, module in self._modules:
            self._names[id(module)] = name
            for key, parameter in module.named_parameters(recurse=False):
                self._leaf(parameter, "parameter", _joined(name, key))
        for name, module in self._modules:
            for key, buffer in module.named_buffers(recurse=False):
                self._leaf(buffer, "buffer", _joined(name, key))
        for name, module in self._modules:
            for key, tensor in vars(module).items():
                if isinstance(tensor, Tensor):
                    self._leaf(tensor, "buffer", _joined(name, key))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # what wrappers hold
            self._leaf(tensor, "parameter" if isinstance(tensor, nn.Parameter) else "buffer", name)

    # ---- values ----

    def _storage(self, tensor: Tensor) -> _Storage:
        try:
            storage = tensor.untyped_storage()
            address = storage._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors and wrapper subclasses: the object is the identity
            return self._storages.setdefault(-id(tensor), _Storage(tensor))
        found = self._storages.get(address)
        if found is None:
            found = self._storages[address] = _Storage(StorageWeakRef(storage))
        return found

    @staticmethod
    def _layout(tensor: Tensor) -> Layout:
        if tensor.layout is not torch.strided:
            return (0, tuple(tensor.shape), (), tensor.dtype)
        return (int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _value(self, tensor: Tensor, origin: Origin, producer: int, position: int, name: str = "") -> int:
        index = len(self.trace.values)
        self.trace.values.append(Value(index, origin, producer, position, name, tuple(tensor.shape), tensor.dtype))
        return index

    def _leaf(self, tensor: Tensor, origin: Origin, name: str) -> int:
        storage = self._storage(tensor)
        layout = self._layout(tensor)
        if layout in storage.known:
            return storage.known[layout][0]
        value = self._value(tensor, origin, -1, 0, name)
        storage.known[layout] = (value, len(storage.writes))
        self.trace.leaves[value] = tensor
        if origin != "constant":
            self._protected.setdefault(id(storage), tensor)
        return value

    def _gathered(self, parameter: Tensor, name: str) -> None:
        """A sharded parameter is another tensor while its module runs: one that was computed, from a collective."""
        known = self._storage(parameter).known
        layout = self._layout(parameter)
        if layout in known and self.trace.values[known[layout][0]].origin == "node":
            del known[layout]
        self._leaf(parameter, "parameter", name)

    def register_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        named = [(str(i), arg) for i, arg in enumerate(args)] + list(kwargs.items())
        inputs = [
            self._leaf(leaf, "input", name)
            for name, arg in named
            for leaf in tree_leaves(arg)
            if isinstance(leaf, Tensor)
        ]
        for value in inputs:
            self.trace.leaves.pop(value, None)
        return tuple(inputs)

    def lookup(self, tensor: Tensor) -> int:
        """The value that a tensor holds now."""
        storage = self._storage(tensor)
        layout = self._layout(tensor)
        found = storage.known.get(layout)
        if found is None:
            if not storage.known:
                return self._leaf(tensor, "constant", "")
            found = next(iter(storage.known.values()))  # seen under another layout: made outside dispatch (.data)
        value, included = found
        if included < len(storage.writes):
            value = self._overlay(tensor, layout, value, storage.writes[included:])
            storage.known[layout] = (value, len(storage.writes))
        elif layout not in storage.known:
            value = self._overlay(tensor, layout, value, [])
            storage.known[layout] = (value, len(storage.writes))
        return value

    def lookup_all(self, structure: Any) -> tuple[int, ...]:
        """The values of all tensors in a structure."""
        return tuple(self.lookup(leaf) for leaf in tree_leaves(structure) if isinstance(leaf, Tensor))

    def _overlay(self, tensor: Tensor, layout: Layout, old: int, writes: list[_Write]) -> int:
        low, high = _extent(tensor)
        inputs = [old]
        for write in writes:
            if write.whole:
                inputs = [write.value]
            elif write.low < high and low < write.high:
                inputs.append(write.value)
        if inputs == [old] and writes:
            return old
        index = len(self.trace.nodes)
        value = self._value(tensor, "node", index, 0)
        refs = tuple(Ref(i) for i in inputs)
        self.trace.nodes.append(Node(index, None, refs, {}, tuple(inputs), (value,), self._here()))
        return value

    def _here(self) -> int:
        return self._stack[-1] if self._stack else -1

    # ---- operators ----

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():  # the model's own: autograd took nothing apart
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        inputs: list[int] = []

        def template(item: Any) -> Any:
            if isinstance(item, Tensor):
                value = self.lookup(item)
                inputs.append(value)
                return Ref(value)
            if isinstance(item, list | tuple):
                return type(item)(template(x) for x in item) if type(item) in (list, tuple) else item
            return item

        args_template = tuple(template(arg) for arg in args)
        kwargs_template = {name: template(arg) for name, arg in kwargs.items()}
        written: list[Tensor] = []
        for place in written_arguments(func):
            argument = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            written += flat_tensors(argument)
        undeclared = flat_tensors(list(args[3:5])) if func._schema.name in _UNDECLARED_WRITES else []
        for tensor in (*written, *undeclared):
            self._keep(tensor)
        seen = None
        if self._watch is not None:
            call = self.trace.calls[self._stack[-1]] if self._stack else None
            seen = self._watch.before(func, call, args, kwargs)
        result = self._run(func, args, kwargs)
        index = len(self.trace.nodes)
        line = calling_line()
        node = Node(index, func, args_template, kwargs_template, tuple(inputs), (), self._here(), line)
        self.trace.nodes.append(node)
        outputs = flat_tensors(result)
        outputs += [tensor for tensor in written if all(tensor is not other for other in outputs)]
        if self._watch is not None and seen:
            self._watch.after(seen, outputs)
        node.outputs = tuple(
            self._record_output(tensor, index, position, any(tensor is other for other in written))
            for position, tensor in enumerate(outputs)
        )
        return result

    def _record_output(self, tensor: Tensor, node: int, position: int, written: bool) -> int:
        value = self._value(tensor, "node", node, position)
        storage = self._storage(tensor)
        layout = self._layout(tensor)
        if written:
            low, high = _extent(tensor)
            whole = tensor.layout is not torch.strided or (
                tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes() and tensor.is_contiguous()
            )
            storage.writes.append(_Write(value, low, high, whole))
            storage.known[layout] = (value, len(storage.writes))
        else:
            found = storage.known.get(layout)
            if found is None or found[1] < len(storage.writes):
                storage.known[layout] = (value, len(storage.writes))
        return value

    def _run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = flat_tensors([*args, *kwargs.values()])
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        module = self.trace.calls[self._stack[-1]].name if self._stack else ""
        return run_on_meta(func, args, kwargs, lambda value: self.trace.guesses.append(Guess(str(func), module, value)))

    def _keep(self, tensor: Tensor) -> None:
        """Copy a parameter, buffer or input before it is written for the first time."""
        storage = id(self._storage(tensor))
        leaf = self._protected.get(storage)
        if leaf is not None and storage not in self._kept:
            self._kept[storage] = (leaf, leaf.detach().clone())

    def restore(self) -> None:
        """Give parameters, buffers and inputs that were written in place their values back."""
        for leaf, before in self._kept.values():
            leaf.detach().copy_(before)

    def close(self) -> None:
        """Forget what only the run needed."""
        self._storages.clear()
        self._protected.clear()
        self._kept.clear()

    # ---- module calls ----

    @contextlib.contextmanager
    def hooks(self) -> Generator[None, None, None]:
        """Hooks on every module for the length of the run."""
        handles = []
        try:
            for _, module in self._modules:
                with contextlib.suppress(RuntimeError, AttributeError):  # scripted modules refuse some hooks
                    handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                    handles.append(
                        module.register_forward_hook(self._leave, with_kwargs=True, always_call=True, prepend=True)
                    )
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls = self.trace.calls
        order = self._orders.get(id(module), 0)
        self._orders[id(module)] = order + 1
        call = ModuleCall(
            len(calls),
            self._names.get(id(module), ""),
            module,
            self._stack[-1] if self._stack else -1,
            order,
            len(self.trace.nodes),
        )
        for key, parameter in module.named_parameters(recurse=False):
            self._gathered(parameter, _joined(call.name, key))
        found: list[int] = []
        call.args = tuple(self._template(arg, found) for arg in args)
        call.kwargs = {name: self._template(arg, found) for name, arg in kwargs.items()}
        call.inputs = tuple(found)
        call.first = len(self.trace.nodes)
        calls.append(call)
        self._stack.append(call.index)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls = self.trace.calls
        if all(calls[index].module is not module for index in self._stack):
            return  # the module's pre-hook never ran
        while self._stack:
            call = calls[self._stack.pop()]
            found: list[int] = []
            if call.module is module:
                call.result = self._template(output, found)
                call.outputs = tuple(found)
            call.last = len(self.trace.nodes)
            if call.module is module:
                error = sys.exc_info()[1]
                if output is None and error is not None:
                    call.failed = True
                    if id(error) not in self._blamed:
                        self._blamed.add(id(error))
                        self.trace.failures.append(Failure(call.name, error))
                return
            call.failed = True

    def blame(self, error: BaseException) -> None:
        """Name the innermost module that did not return; a module's hooks do not see an exit of the process."""
        if id(error) in self._blamed:
            return
        calls = self.trace.calls
        name = calls[self._stack[-1]].name if self._stack else ""
        while self._stack:
            call = calls[self._stack.pop()]
            call.failed, call.last = True, len(self.trace.nodes)
        self.trace.failures.append(Failure(name, error))

    def _template(self, item: Any, found: list[int]) -> Any:
        if isinstance(item, _PLAIN):
            return item

        def leaf(value: Any) -> Any:
            if isinstance(value, Tensor):
                index = self.lookup(value)
                found.append(index)
                stride = value.stride() if value.layout is torch.strided else ()
                return TensorInfo(index, tuple(value.shape), stride, value.dtype, value.device)
            return value if isinstance(value, _PLAIN) else Opaque(type(value).__qualname__)

        return leaf(item) if isinstance(item, Tensor) else tree_map(leaf, item)


def _joined(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The byte range that a tensor's elements lie in, within its storage."""
    if tensor.layout is not torch.strided:
        return (0, sys.maxsize)
    size = tensor.element_size()
    if tensor.numel() == 0:
        return (0, 0)
    low = int(tensor.storage_offset())
    high = low + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (low * size, high * size)
