"""Normalizations as modules."""

from normkit.nn.build import Norm as Norm
from normkit.nn.build import build as build
from normkit.nn.rows import LayerNorm as LayerNorm
from normkit.nn.rows import RMSNorm as RMSNorm

__all__ = ["LayerNorm", "Norm", "RMSNorm", "build"]
