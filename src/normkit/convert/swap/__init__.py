"""Give a model's norms normkit's kernels, and prove it."""

from normkit.convert.swap.core import SwapReceipt as SwapReceipt
from normkit.convert.swap.core import swap as swap
from normkit.convert.swap.reclass import unswap as unswap

__all__ = ["SwapReceipt", "swap", "unswap"]
