"""Change a model's norms and prove it: every conversion hands back a receipt."""

from normkit.convert.receipt import Change as Change
from normkit.convert.receipt import ConversionError as ConversionError
from normkit.convert.receipt import Difference as Difference
from normkit.convert.receipt import Errors as Errors
from normkit.convert.receipt import Receipt as Receipt
from normkit.convert.receipt import Refusal as Refusal
from normkit.convert.receipt import Speed as Speed
from normkit.convert.swap import SwapReceipt as SwapReceipt
from normkit.convert.swap import unswap as unswap

__all__ = ["Change", "ConversionError", "Difference", "Errors", "Receipt", "Refusal", "Speed", "SwapReceipt", "unswap"]
