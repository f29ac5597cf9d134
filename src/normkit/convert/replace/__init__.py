"""Replace norms, or the placement, for further training: outputs change, and the receipt says by how much."""

from normkit.convert.replace.core import TARGETS as TARGETS
from normkit.convert.replace.core import replace as replace
from normkit.convert.replace.stored import load_replaced as load_replaced
from normkit.convert.replace.stored import replace_folder as replace_folder

__all__ = ["TARGETS", "load_replaced", "replace", "replace_folder"]
