"""Audit any model's norms by behaviour and dataflow."""

from normkit.audit.compare import Diff as Diff
from normkit.audit.compare import diff as diff
from normkit.audit.core import AuditError as AuditError
from normkit.audit.core import assert_clean as assert_clean
from normkit.audit.core import audit as audit
from normkit.audit.identify import Identification as Identification
from normkit.audit.identify import identify as identify
from normkit.audit.monitor import Monitor as Monitor
from normkit.audit.result import Audit as Audit
from normkit.audit.result import BranchRecord as BranchRecord
from normkit.audit.result import Finding as Finding
from normkit.audit.result import NormRecord as NormRecord

__all__ = [
    "Audit",
    "AuditError",
    "BranchRecord",
    "Diff",
    "Finding",
    "Identification",
    "Monitor",
    "NormRecord",
    "assert_clean",
    "audit",
    "diff",
    "identify",
]
