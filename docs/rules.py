"""Write docs/rules.md and the pages of docs/rules from the rules themselves: ``python docs/rules.py --write``."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from normkit.audit.rules import RULES

DOCS = Path(__file__).parent
TOPICS = {
    "precision": "Precision",
    "convention": "Convention",
    "placement": "Placement",
    "batch": "Batch statistics",
    "training": "Training",
    "numbers": "Numbers, measured on given data",
    "speed": "Speed",
    "coverage": "Coverage",
}
HEAD = """# The audit's rules

`normkit audit` and `normkit.audit` run these on every model; `--select` and `--ignore` (`select=`, `ignore=`) take ids
and topics. `normkit rules` lists them, `normkit rules ID` prints a page.

A severity is fixed by one criterion. **error**: wrong numbers or NaN can follow in what was audited. **warning**:
training, or porting to other code, can go wrong. **info**: good to know.

In a test suite, `normkit.assert_clean(model, inputs, fail_on="warning", ignore=[...])` raises with the findings.
"""


def pages() -> dict[Path, str]:
    """Each page's path and text."""
    written = {DOCS / "rules" / f"{r.id}.md": r.page() for r in RULES.values()}
    parts = [HEAD]
    order = list(TOPICS)
    for topic, rules in groupby(sorted(RULES.values(), key=lambda r: order.index(r.topic)), key=lambda r: r.topic):
        parts.append(f"\n## {TOPICS[topic]}\n\n| rule | severity | fires where |\n| - | - | - |\n")
        parts += [f"| [{r.id}](rules/{r.id}.md) | {r.severity} | {r.summary} |\n" for r in rules]
    return {DOCS / "rules.md": "".join(parts), **written}


def stale() -> list[str]:
    """Pages that are missing, differ, or belong to no rule."""
    made = pages()
    wrong = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    return wrong + [path.name for path in (DOCS / "rules").glob("*.md") if path not in made]


if __name__ == "__main__":
    if "--write" in sys.argv:
        (DOCS / "rules").mkdir(exist_ok=True)
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
    print("\n".join(stale()) or "up to date")
