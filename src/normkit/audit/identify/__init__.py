"""What a module computes, by behaviour: one file a measurement."""

from normkit.audit.identify.identification import Identification as Identification
from normkit.audit.identify.identification import identify as identify

__all__ = ["Identification", "identify"]
