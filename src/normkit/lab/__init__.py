"""The lab: statements about normalization, each with its measurement, its criterion and a computed verdict."""

from normkit.lab.claim import Claim as Claim
from normkit.lab.claim import Row as Row
from normkit.lab.claim import Verdict as Verdict
from normkit.lab.register import register as register

__all__ = ["Claim", "Row", "Verdict", "register"]
