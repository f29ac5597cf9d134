"""Normalizations as functions: torch's positional arguments, more by keyword, any dtype pair."""

from normkit.functional.batch import BatchNormResult as BatchNormResult
from normkit.functional.batch import batch_norm as batch_norm
from normkit.functional.batch import batch_norm_functional as batch_norm_functional
from normkit.functional.batch import instance_norm as instance_norm
from normkit.functional.core import as_shape as as_shape
from normkit.functional.core import norm as norm
from normkit.functional.groups import group_norm as group_norm
from normkit.functional.other import derf as derf
from normkit.functional.other import dynamic_tanh as dynamic_tanh
from normkit.functional.other import filter_response_norm as filter_response_norm
from normkit.functional.other import global_response_norm as global_response_norm
from normkit.functional.other import l2_norm as l2_norm
from normkit.functional.other import layer_scale as layer_scale
from normkit.functional.other import modulate as modulate
from normkit.functional.other import pixel_norm as pixel_norm
from normkit.functional.other import scale_norm as scale_norm
from normkit.functional.other import seed_norm as seed_norm
from normkit.functional.renorm import batch_renorm as batch_renorm
from normkit.functional.renorm import power_norm as power_norm
from normkit.functional.rows import layer_norm as layer_norm
from normkit.functional.rows import rms_norm as rms_norm

__all__ = [
    "BatchNormResult",
    "batch_norm",
    "batch_norm_functional",
    "batch_renorm",
    "derf",
    "dynamic_tanh",
    "filter_response_norm",
    "global_response_norm",
    "group_norm",
    "instance_norm",
    "l2_norm",
    "layer_norm",
    "layer_scale",
    "modulate",
    "norm",
    "pixel_norm",
    "power_norm",
    "rms_norm",
    "scale_norm",
    "seed_norm",
]
