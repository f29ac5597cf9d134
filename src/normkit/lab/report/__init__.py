"""The report: one HTML page and Markdown, from a results file alone."""

from normkit.lab.report.write import ReportError as ReportError
from normkit.lab.report.write import write as write

__all__ = ["ReportError", "write"]
