"""Findings for machines that gate a change: SARIF 2.1.0, and GitHub's annotations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normkit.audit.result import Audit, Finding, collapse
from normkit.audit.rules import RULES

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"info": "note", "warning": "warning", "error": "error"}
_COMMANDS = {"info": "notice", "warning": "warning", "error": "error"}


def sarif(audit: Audit, *, title: str) -> dict[str, Any]:
    """The findings as a SARIF 2.1.0 log of one run.

    Each finding names its norms as logical locations, and as physical ones the lines that run them, where they are
    known. A finding keeps its fingerprint as long as its rule, its norms and its model's name stay.

    Args:
        audit: what was found.
        title: what the model is called.
    """
    import normkit

    used = list(dict.fromkeys(f.rule for f in audit.findings))
    driver = {
        "name": "normkit",
        "semanticVersion": normkit.__version__,
        "rules": [_rule(name, audit.findings) for name in used],
    }
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"normkit/{title}/"},
        "results": [_result(audit, f, used, title) for f in audit.findings],
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str, findings: tuple[Finding, ...]) -> dict[str, Any]:
    severity = next(f.severity for f in findings if f.rule == name)
    text = RULES[name].summary if name in RULES else name
    return {
        "id": name,
        "shortDescription": {"text": text[:1].upper() + text[1:] + "."},
        "defaultConfiguration": {"level": _LEVELS[severity]},
    }


def _result(audit: Audit, finding: Finding, used: list[str], title: str) -> dict[str, Any]:
    layers = "|".join((title, finding.rule, *sorted({*map(collapse, finding.where)})))
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": used.index(finding.rule),
        "level": _LEVELS[finding.severity],
        "message": {"text": _text(finding, title)},
        "partialFingerprints": {"normkit/v1": layers},
    }
    lines = _lines(audit, finding)
    names = [{"fullyQualifiedName": name, "kind": "member"} for name in finding.where]
    if lines:
        result["locations"] = [_physical(*line) | ({"logicalLocations": names} if n == 0 and names else {})
                               for n, line in enumerate(lines)]  # fmt: skip
    elif names:
        result["locations"] = [{"logicalLocations": names}]
    return result


def _lines(audit: Audit, finding: Finding) -> list[tuple[str, int]]:
    """The distinct lines that run the norms of a finding."""
    places = {n.name: n.location for n in audit.norms}
    found = dict.fromkeys(line for name in finding.where if (line := places.get(name)) is not None)
    return list(found)


def _physical(file: str, line: int) -> dict[str, Any]:
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(file)}, "region": {"startLine": max(1, line)}}}


def _uri(file: str) -> str:
    """Relative to the working directory where the file lies below it, as code scanning wants it."""
    path = Path(file).resolve()
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_uri()


def github(audit: Audit, *, title: str) -> Iterator[str]:
    """The findings as GitHub's workflow commands, one line each."""
    for finding in audit.findings:
        lines = _lines(audit, finding)
        place = ""
        if lines and not (uri := _uri(lines[0][0])).startswith("file:"):
            place = f"file={_property(uri)},line={lines[0][1]},"
        text = _message(_text(finding, title))
        yield f"::{_COMMANDS[finding.severity]} {place}title={_property(f'{title}: {finding.rule}')}::{text}"


def _text(finding: Finding, title: str) -> str:
    where = ", ".join(finding.where[:3]) + (f" and {len(finding.where) - 3} more" if len(finding.where) > 3 else "")
    return f"{where or title}: {finding.message}. Fix: {finding.fix}."


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
