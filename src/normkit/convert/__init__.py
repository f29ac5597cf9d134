"""Change a model's norms and prove it: every conversion hands back a receipt."""

from normkit.convert.fold import FixedAffine as FixedAffine
from normkit.convert.fold import fold as fold
from normkit.convert.fold import fold_batch_norm as fold_batch_norm
from normkit.convert.fold import layer_to_rms as layer_to_rms
from normkit.convert.recalibrate import recalibrate as recalibrate
from normkit.convert.receipt import Change as Change
from normkit.convert.receipt import ConversionError as ConversionError
from normkit.convert.receipt import Difference as Difference
from normkit.convert.receipt import Errors as Errors
from normkit.convert.receipt import Receipt as Receipt
from normkit.convert.receipt import Refusal as Refusal
from normkit.convert.receipt import Speed as Speed
from normkit.convert.replace import load_replaced as load_replaced
from normkit.convert.replace import replace as replace
from normkit.convert.swap import SwapReceipt as SwapReceipt
from normkit.convert.swap import unswap as unswap

__all__ = [
    "Change",
    "ConversionError",
    "Difference",
    "Errors",
    "FixedAffine",
    "Receipt",
    "Refusal",
    "Speed",
    "SwapReceipt",
    "fold",
    "fold_batch_norm",
    "layer_to_rms",
    "load_replaced",
    "recalibrate",
    "replace",
    "unswap",
]
