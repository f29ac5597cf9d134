"""Which elements of an input share one statistic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.checks import check_arguments
from normkit.reference import split, split_dims
from normkit.spec import NormSpec, partial_count


def set_ids(spec: NormSpec, shape: Sequence[int]) -> Tensor:
    """A number for each element, equal for elements that share a statistic.

    Args:
        spec: the normalization.
        shape: the input's shape.

    Returns:
        An int64 tensor of that shape, its sets numbered from 0 in the order of their first elements.

    Raises:
        ValueError: a shape that the spec cannot be applied to.
    """
    check_shape(spec, shape)
    groups = split(torch.zeros(tuple(shape), dtype=torch.int64), spec)
    shared = {d % groups.dim() for d in split_dims(groups, spec)}
    kept = [1 if d in shared else n for d, n in enumerate(groups.shape)]
    return torch.arange(math.prod(kept)).reshape(kept).expand(groups.shape).reshape(tuple(shape))


def counted(spec: NormSpec, shape: Sequence[int]) -> Tensor:
    """Whether each element enters the statistic that it is divided by (not all do in pRMSNorm)."""
    enters = torch.ones(tuple(shape), dtype=torch.bool)
    if spec.partial < 1:
        assert isinstance(spec.channel_dim, int)
        dim = spec.channel_dim % len(shape)
        kept = partial_count(spec.partial, shape[dim])
        enters.narrow(dim, kept, shape[dim] - kept).fill_(False)
    return enters


def check_shape(spec: NormSpec, shape: Sequence[int]) -> None:
    """Refuse a shape that the spec cannot be applied to.

    Raises:
        ValueError: what the spec needs and what it got.
    """
    if math.prod(shape) == 0:
        raise ValueError(f"shape {list(shape)} holds no element to explain")
    plain = spec.replace(has_weight=False, has_bias=False, gate=None)
    check_arguments(torch.empty(tuple(shape), device="meta"), plain, None, None, None, None, None, None)
