"""Find every norm in a trace: modules, and norms written inline as operators."""

from normkit.audit.find.inline import Occurrence as Occurrence
from normkit.audit.find.modules import find_norms as find_norms
from normkit.audit.find.modules import weight_place as weight_place
from normkit.audit.find.unreached import Unreached as Unreached
from normkit.audit.find.unreached import find_unreached as find_unreached

__all__ = ["Occurrence", "Unreached", "find_norms", "find_unreached", "weight_place"]
