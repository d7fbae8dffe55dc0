"""What a run, an experiment or a curvature measurement found, for people: self-contained HTML, short Markdown."""

from rmcore.report.curvature import write_curvature_page
from rmcore.report.experiment import write_experiment_report
from rmcore.report.experiment_schema import ExperimentResults
from rmcore.report.experiment_summary import experiment_markdown
from rmcore.report.html import write_report
from rmcore.report.schema import Results
from rmcore.report.summary import summary_markdown

__all__ = [
    "ExperimentResults",
    "Results",
    "experiment_markdown",
    "summary_markdown",
    "write_curvature_page",
    "write_experiment_report",
    "write_report",
]
