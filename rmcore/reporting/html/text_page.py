"""A report of what a flow says in Markdown, with its figures: for runs whose result is a table and some sentences."""

from collections.abc import Mapping
from pathlib import Path

from markdown_it import MarkdownIt
from markupsafe import Markup

from rmcore.reporting.html.page import write_page

TEMPLATE = "text.html.j2"
_HTML_OFF = {"html": False}
"""Markup in a text is shown as it is typed: names of columns and models come from people."""


def write_text_report(title: str, markdown: str, figures: Mapping[str, Path], out: Path) -> Path:
    """Write a text and its figures as one self-contained HTML file to `out`; returns `out`.

    Args:
        title: of the page, for example the run's name.
        markdown: CommonMark with tables.
        figures: PNG files by name, shown after the text.
        out: HTML file to write; its folder is made.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    text = MarkdownIt("commonmark", _HTML_OFF).enable("table").render(markdown)
    values = {"title": title, "text": Markup(text), "names": list(figures)}  # noqa: S704 - rendered without markup of its own
    return write_page(TEMPLATE, values, figures, {}, out)
