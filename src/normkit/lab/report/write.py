"""Write a report: report.html (stands alone), report.md and the figures beside it, and the verdicts as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from normkit.lab.claim import Claim, Row
from normkit.lab.report.content import Report, build
from normkit.lab.verdicts import decide, to_json


class ReportError(ValueError):
    """No report can be written; the message is for the user."""


def write(claims: Iterable[Claim], rows: list[Row], folder: Path) -> Report:
    """Write ``report.html``, ``report.md``, ``figures/*.svg`` and ``verdicts.json`` into a folder.

    The same rows give the same bytes. The page needs nothing beside itself; the Markdown shows the figures' files.

    Raises:
        ReportError: matplotlib or Jinja2 is missing, or the folder cannot be written.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError(f"a report needs {error.name}: pip install 'normkit[lab]'") from error
    claims = list(claims)
    report = build(claims, rows)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("normkit.lab.report", "."),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["cell"] = _cell
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for entry in report.entries:
            if entry.figure:
                (folder / "figures" / f"{entry.id}.svg").write_text(entry.figure, encoding="utf-8")
        for name in ("report.html", "report.md"):
            text = environment.get_template(f"{name}.j2").render(report=report)
            (folder / name).write_text(text, encoding="utf-8")
        verdicts = to_json(decide(claim, rows) for claim in claims)
        (folder / "verdicts.json").write_text(verdicts, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write to {folder}: {error.strerror}") from error
    return report


def _cell(text: str) -> str:
    """Text in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
