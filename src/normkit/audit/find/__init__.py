"""Find every norm in a trace: modules, and norms written inline as operators."""

from normkit.audit.find.inline import Occurrence as Occurrence
from normkit.audit.find.modules import find_norms as find_norms
from normkit.audit.find.modules import weight_place as weight_place

__all__ = ["Occurrence", "find_norms", "weight_place"]
