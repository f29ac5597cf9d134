"""Two models' norms side by side, and the first one at which their activations part."""

from normkit.audit.compare.compare import diff as diff
from normkit.audit.compare.result import Diff as Diff
from normkit.audit.compare.result import Pair as Pair
from normkit.audit.compare.result import Parting as Parting

__all__ = ["Diff", "Pair", "Parting", "diff"]
