"""The rules: each looks at what the audit saw and yields findings.

To add one: write a function under `@rule(...)` in the file of its topic (or a new file imported below), and its page
``pages/ID.md``, whose example fires it and whose fix does not.
"""

from normkit.audit.rules import batch as batch
from normkit.audit.rules import convention as convention
from normkit.audit.rules import coverage as coverage
from normkit.audit.rules import numbers as numbers
from normkit.audit.rules import placement as placement
from normkit.audit.rules import precision as precision
from normkit.audit.rules import speed as speed
from normkit.audit.rules import training as training
from normkit.audit.rules.registry import RULES as RULES
from normkit.audit.rules.registry import Evidence as Evidence
from normkit.audit.rules.registry import Rule as Rule
from normkit.audit.rules.registry import check as check
from normkit.audit.rules.registry import chosen as chosen

__all__ = ["RULES", "Evidence", "Rule", "check", "chosen"]
