"""normkit: the normalization toolkit for PyTorch."""

from normkit import functional as functional
from normkit import nn as nn
from normkit.audit import audit as audit
from normkit.audit import identify as identify
from normkit.placement import Placement as Placement
from normkit.spec import NormSpec as NormSpec

__version__ = "0.1.0"
__all__ = ["NormSpec", "Placement", "audit", "functional", "identify", "nn"]
