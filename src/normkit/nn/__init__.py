"""Normalizations as modules."""

from normkit.nn.adaptive import AdaLayerNorm as AdaLayerNorm
from normkit.nn.adaptive import AdaLayerNormZero as AdaLayerNormZero
from normkit.nn.adaptive import SeeDNorm as SeeDNorm
from normkit.nn.batch import BatchNorm as BatchNorm
from normkit.nn.batch import BatchNorm1d as BatchNorm1d
from normkit.nn.batch import BatchNorm2d as BatchNorm2d
from normkit.nn.batch import BatchNorm3d as BatchNorm3d
from normkit.nn.build import Norm as Norm
from normkit.nn.build import build as build
from normkit.nn.gated import GatedRMSNorm as GatedRMSNorm
from normkit.nn.groups import GroupNorm as GroupNorm
from normkit.nn.instance import InstanceNorm1d as InstanceNorm1d
from normkit.nn.instance import InstanceNorm2d as InstanceNorm2d
from normkit.nn.instance import InstanceNorm3d as InstanceNorm3d
from normkit.nn.lengths import L2Norm as L2Norm
from normkit.nn.lengths import PixelNorm as PixelNorm
from normkit.nn.lengths import ScaleNorm as ScaleNorm
from normkit.nn.pointwise import Derf as Derf
from normkit.nn.pointwise import DynamicTanh as DynamicTanh
from normkit.nn.pointwise import LayerScale as LayerScale
from normkit.nn.power import PowerNorm as PowerNorm
from normkit.nn.qk import QKNorm as QKNorm
from normkit.nn.recurrent import LayerNormGRU as LayerNormGRU
from normkit.nn.recurrent import LayerNormGRUCell as LayerNormGRUCell
from normkit.nn.recurrent import LayerNormLSTM as LayerNormLSTM
from normkit.nn.recurrent import LayerNormLSTMCell as LayerNormLSTMCell
from normkit.nn.recurrent import RMSNormGRU as RMSNormGRU
from normkit.nn.recurrent import RMSNormGRUCell as RMSNormGRUCell
from normkit.nn.recurrent import RMSNormLSTM as RMSNormLSTM
from normkit.nn.recurrent import RMSNormLSTMCell as RMSNormLSTMCell
from normkit.nn.renorm import BatchRenorm as BatchRenorm
from normkit.nn.renorm import GhostBatchNorm as GhostBatchNorm
from normkit.nn.renorm import Ramp as Ramp
from normkit.nn.response import TLU as TLU
from normkit.nn.response import FilterResponseNorm as FilterResponseNorm
from normkit.nn.response import GlobalResponseNorm as GlobalResponseNorm
from normkit.nn.rows import LayerNorm as LayerNorm
from normkit.nn.rows import RMSNorm as RMSNorm
from normkit.nn.sync import SyncBatchNorm as SyncBatchNorm
from normkit.nn.sync_convert import convert_sync_batchnorm as convert_sync_batchnorm
from normkit.nn.sync_convert import revert_sync_batchnorm as revert_sync_batchnorm

__all__ = [
    "TLU",
    "AdaLayerNorm",
    "AdaLayerNormZero",
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchRenorm",
    "Derf",
    "DynamicTanh",
    "FilterResponseNorm",
    "GatedRMSNorm",
    "GhostBatchNorm",
    "GlobalResponseNorm",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "L2Norm",
    "LayerNorm",
    "LayerNormGRU",
    "LayerNormGRUCell",
    "LayerNormLSTM",
    "LayerNormLSTMCell",
    "LayerScale",
    "Norm",
    "PixelNorm",
    "PowerNorm",
    "QKNorm",
    "RMSNorm",
    "RMSNormGRU",
    "RMSNormGRUCell",
    "RMSNormLSTM",
    "RMSNormLSTMCell",
    "Ramp",
    "ScaleNorm",
    "SeeDNorm",
    "SyncBatchNorm",
    "build",
    "convert_sync_batchnorm",
    "revert_sync_batchnorm",
]
