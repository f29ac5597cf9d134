"""Normalizations as functions: torch's positional arguments, more by keyword, any dtype pair."""

from normkit.functional.batch import BatchNormResult as BatchNormResult
from normkit.functional.batch import batch_norm as batch_norm
from normkit.functional.batch import batch_norm_functional as batch_norm_functional
from normkit.functional.batch import instance_norm as instance_norm
from normkit.functional.core import as_shape as as_shape
from normkit.functional.core import norm as norm
from normkit.functional.groups import group_norm as group_norm
from normkit.functional.rows import layer_norm as layer_norm
from normkit.functional.rows import rms_norm as rms_norm

__all__ = [
    "BatchNormResult",
    "batch_norm",
    "batch_norm_functional",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "norm",
    "rms_norm",
]
