"""Replace norms, or the placement, for further training: outputs change, and the receipt says by how much."""

from normkit.convert.replace.core import TARGETS as TARGETS
from normkit.convert.replace.core import replace as replace

__all__ = ["TARGETS", "replace"]
