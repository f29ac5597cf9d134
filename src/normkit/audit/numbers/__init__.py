"""Numbers measured with data: stream RMS, branch share, gains, outliers, attention logits, gradients by depth."""

from normkit.audit.numbers.record import AttentionNumbers as AttentionNumbers
from normkit.audit.numbers.record import BranchNumbers as BranchNumbers
from normkit.audit.numbers.record import GainNumbers as GainNumbers
from normkit.audit.numbers.record import NormNumbers as NormNumbers
from normkit.audit.numbers.record import Numbers as Numbers

__all__ = ["AttentionNumbers", "BranchNumbers", "GainNumbers", "NormNumbers", "Numbers"]
