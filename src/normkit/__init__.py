"""normkit: the normalization toolkit for PyTorch."""

from typing import Any

from normkit import functional as functional
from normkit import nn as nn
from normkit.audit import Monitor as Monitor
from normkit.audit import assert_clean as assert_clean
from normkit.audit import audit as audit
from normkit.audit import diff as diff
from normkit.audit import identify as identify
from normkit.audit.groups import param_groups as param_groups
from normkit.convert.swap import swap as swap
from normkit.placement import PLACEMENTS as PLACEMENTS
from normkit.placement import SCHEDULES as SCHEDULES
from normkit.placement import Placement as Placement
from normkit.placement import placement as placement
from normkit.placement import schedule as schedule
from normkit.residual import Residual as Residual
from normkit.residual import Transformer as Transformer
from normkit.residual import init_for as init_for
from normkit.spec import NormSpec as NormSpec

__version__ = "0.1.0"
__all__ = [
    "PLACEMENTS",
    "SCHEDULES",
    "Monitor",
    "NormSpec",
    "Placement",
    "Residual",
    "Transformer",
    "assert_clean",
    "audit",
    "diff",
    "functional",
    "identify",
    "init_for",
    "lab",
    "nn",
    "param_groups",
    "placement",
    "schedule",
    "swap",
]


def __getattr__(name: str) -> Any:
    """`normkit.lab`, imported when it is first asked for."""
    if name == "lab":
        import importlib

        return importlib.import_module("normkit.lab")
    raise AttributeError(f"module 'normkit' has no attribute {name!r}")
