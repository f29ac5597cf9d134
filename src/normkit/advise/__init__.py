"""advise: which norm, where, and why, for a stated situation."""

from normkit.advise.advice import Advice as Advice
from normkit.advise.advice import Choice as Choice
from normkit.advise.advice import advise as advise
from normkit.advise.evidence import Evidence as Evidence
from normkit.advise.evidence import Results as Results
from normkit.advise.request import Refused as Refused
from normkit.advise.request import Request as Request

__all__ = ["Advice", "Choice", "Evidence", "Refused", "Request", "Results", "advise"]
