"""Coverage: what the audited run did not reach."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.audit.result import Finding
from normkit.audit.rules.registry import Evidence, MakeFinding, rule


@rule("norm-never-ran", "info", "the model holds norms that the audited run did not reach")
def norm_never_ran(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Another input, head or mode would; or the module is dead weight. Nothing is said of where it sits."""
    if evidence.never_ran:
        yield finding(
            evidence.never_ran,
            "behaves as a norm, and was not called in the audited run: nothing is known of where it sits",
            "audit with inputs that reach it (an encoder's, a second modality's, labels); or take the module out",
        )
