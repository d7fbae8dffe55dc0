"""What a run found, for people: a self-contained HTML page and a short Markdown summary."""

from rmcore.report.html import write_report
from rmcore.report.schema import Results
from rmcore.report.summary import summary_markdown

__all__ = ["Results", "summary_markdown", "write_report"]
