"""Normalizations as modules."""

from normkit.nn.batch import BatchNorm as BatchNorm
from normkit.nn.batch import BatchNorm1d as BatchNorm1d
from normkit.nn.batch import BatchNorm2d as BatchNorm2d
from normkit.nn.batch import BatchNorm3d as BatchNorm3d
from normkit.nn.build import Norm as Norm
from normkit.nn.build import build as build
from normkit.nn.groups import GroupNorm as GroupNorm
from normkit.nn.instance import InstanceNorm1d as InstanceNorm1d
from normkit.nn.instance import InstanceNorm2d as InstanceNorm2d
from normkit.nn.instance import InstanceNorm3d as InstanceNorm3d
from normkit.nn.rows import LayerNorm as LayerNorm
from normkit.nn.rows import RMSNorm as RMSNorm
from normkit.nn.sync import SyncBatchNorm as SyncBatchNorm
from normkit.nn.sync_convert import convert_sync_batchnorm as convert_sync_batchnorm
from normkit.nn.sync_convert import revert_sync_batchnorm as revert_sync_batchnorm

__all__ = [
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "Norm",
    "RMSNorm",
    "SyncBatchNorm",
    "build",
    "convert_sync_batchnorm",
    "revert_sync_batchnorm",
]
