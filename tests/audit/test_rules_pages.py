"""docs/rules: the rules' own pages, all of them, and an index."""

from __future__ import annotations

from pathlib import Path

import pytest

from normkit.audit.rules import RULES
from tests.pages import script

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_are_up_to_date() -> None:
    assert script("docs/rules.py").stale() == [], "run python docs/rules.py --write"


def test_a_changed_page_and_one_of_no_rule_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("docs/rules.py")
    monkeypatch.setattr(made, "DOCS", tmp_path)
    (tmp_path / "rules").mkdir()
    for path, text in made.pages().items():
        path.write_text(text, encoding="utf-8")
    assert made.stale() == []
    (tmp_path / "rules" / "eps-vanishes.md").write_text("something else")
    (tmp_path / "rules" / "no-such-rule.md").write_text("")
    assert sorted(made.stale()) == ["eps-vanishes.md", "no-such-rule.md"]


def test_the_index_names_every_rule() -> None:
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    assert all(f"[{rule}](rules/{rule}.md)" in text for rule in RULES)
