"""Normalizations as modules."""

from normkit.nn.adaptive import AdaLayerNorm as AdaLayerNorm
from normkit.nn.adaptive import AdaLayerNormZero as AdaLayerNormZero
from normkit.nn.adaptive import SeeDNorm as SeeDNorm
from normkit.nn.build import Norm as Norm
from normkit.nn.build import build as build
from normkit.nn.gated import GatedRMSNorm as GatedRMSNorm
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

__all__ = [
    "TLU",
    "AdaLayerNorm",
    "AdaLayerNormZero",
    "BatchRenorm",
    "Derf",
    "DynamicTanh",
    "FilterResponseNorm",
    "GatedRMSNorm",
    "GhostBatchNorm",
    "GlobalResponseNorm",
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
    "build",
]
