"""Running operators on meta tensors that meta tensors cannot run.

A shape or a number that depends on data does not exist on the meta device. Where a plain assumption lets the run
go on (every element selected, every item 0 or False), it is made and written down as a `Guess`, so that a report can
say what it rests on; where none is reasonable, the error says to use real tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from normkit.audit.trace.graph import flat_tensors

aten = torch.ops.aten
Note = Callable[[Any], None]


class DataDependentError(RuntimeError):
    """The model's control flow or a shape depends on values that meta tensors do not have."""


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


def _item(args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Any:
    dtype = args[0].dtype
    value = False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
    note(value)
    return value


def _nonzero(args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Tensor:
    shape = (args[0].numel(), args[0].dim())
    note(f"all {shape[0]} elements nonzero")
    return _empty(args[0], shape, torch.int64)


def _masked_select(args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Tensor:
    count = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    note(f"all {count} elements selected")
    return _empty(args[0], (count,))


def _unique(args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> tuple[Tensor, ...]:
    count = args[0].numel()
    note(f"all {count} elements distinct")
    longs = [_empty(args[0], shape, torch.int64) for shape in (tuple(args[0].shape), (count,))]
    return (_empty(args[0], (count,)), *longs)


def _repeat_interleave(args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Tensor:
    count = kwargs.get("output_size") or args[0].numel()
    note(f"{count} repeats in all")
    return _empty(args[0], (count,), torch.int64)


def _bincount(args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Tensor:
    given = list(args[2:])
    count = max(1, given[0] if given else kwargs.get("minlength", 0))
    note(f"{count} bins")
    return _empty(args[0], (count,), torch.int64)


def _equal(args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> bool:
    note(False)
    return False


def _grouped_mm(args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Tensor:
    a, b = args[0], args[1]
    offs = args[2] if len(args) > 2 else kwargs.get("offs")
    if a.dim() == 2 and b.dim() == 2:
        if offs is None:
            raise DataDependentError("grouped_mm of two matrices needs offsets to know its groups")
        shape: tuple[int, ...] = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 3 and b.dim() == 2:
        shape = (a.shape[1], b.shape[1])
    else:
        shape = (*a.shape[:-1], b.shape[-1])
    note(f"an empty of shape {shape}")
    return _empty(a, shape)


_GUESSED: dict[str, Callable[[tuple[Any, ...], dict[str, Any], Note], Any]] = {
    "aten::_local_scalar_dense": _item,
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::_unique2": _unique,
    "aten::unique_dim": _unique,
    "aten::unique_consecutive": _unique,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::bincount": _bincount,
    "aten::equal": _equal,
    "aten::_grouped_mm": _grouped_mm,
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_ASSERTS = {"aten::_assert_async", "aten::_assert_scalar", "aten::_assert_tensor_metadata"}


def run_on_meta(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Any:
    """Run an operator whose arguments hold at least one meta tensor.

    Args:
        op: the operator.
        args, kwargs: its arguments.
        note: called with each assumption that was made.

    Raises:
        DataDependentError: the result depends on data in a way that no plain assumption covers.
    """
    name = op._schema.name
    if name in _GUESSED and args and isinstance(args[0], Tensor) and args[0].is_meta:
        return _GUESSED[name](args, kwargs, note)
    if name in _ASSERTS:
        return None
    if name in _INDEXING:
        args = (args[0], _all_true(args[1], note), *args[2:])
    elif name in _COPIES and _leaves_meta(name, args, kwargs):
        note("zeros (values of a meta tensor were asked for on a real device)")
        return _zeros_for_copy(name, args, kwargs)
    try:
        return op(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if any(not t.is_meta for t in flat_tensors([*args, *kwargs.values()])):  # a constant made on the default device
            moved = tree_map_only(Tensor, _to_meta, (args, kwargs))
            return op(*moved[0], **moved[1])
        if isinstance(error, NotImplementedError):
            raise DataDependentError(
                f"{op} needs the values of a meta tensor; run the audit on real tensors"
            ) from error
        raise


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _all_true(indices: Any, note: Note) -> list[Tensor | None]:
    """Boolean masks as index tensors that select everything."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and index.is_meta:
            note(f"a mask of shape {tuple(index.shape)} selects everything")
            count = index.numel()
            expanded.extend(torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim()))
        else:
            expanded.append(index)
    return expanded


def _leaves_meta(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "aten::copy_":
        return not args[0].is_meta and args[1].is_meta
    device = kwargs.get("device")
    return args[0].is_meta and device is not None and torch.device(device).type != "meta"


def _zeros_for_copy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if name == "aten::copy_":
        return args[0].zero_()
    return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
