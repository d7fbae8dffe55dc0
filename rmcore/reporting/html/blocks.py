"""Findings as blocks: a title, sentences, tables and figures, which every reader is shown alike.

A module of `html/` turns a record into blocks once. Three renderers know blocks alone: the macro `block` in
`html/macros.html.j2` for the report, `markdown` here for Prefect's artifacts, `print_block` in `rmcore/cli/common.py`
for a terminal. So one more section of a report is one function that returns a `Block`.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rmcore.reporting.html.markdown import bullets, escape, table


class Named(NamedTuple):
    """A cell with its definition in small print below it; Markdown and terminals leave the definition out."""

    text: str
    definition: str


class Table(NamedTuple):
    """Rows under headings; a table whose headings are all empty shows none.

    A first column called "result" is coloured by the signs ✓, ✗ and ? that its cells begin with.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Named]]
    left: Collection[int] = (0,)
    """Columns that are aligned left; the others hold numbers."""
    title: str = ""
    """Names a folded table, which the page opens by a click and Markdown leaves out."""


class Block(NamedTuple):
    """One section, in the order in which it is read."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs."""
    figures: Sequence[str] = ()
    """Names of figures, which only the page shows."""
    tables: Sequence[Table] = ()
    findings: Sequence[str] = ()
    """Sentences below the tables, a list item each."""
    code: str = ""
    """Lines shown as they are, for example YAML."""
    parts: Sequence["Block"] = ()
    """Sections one level below."""
    is_folded: bool = False
    """Detail that the page opens by a click."""


def markdown(block: Block, level: int = 1) -> str:
    """The block in Markdown, its title a heading of `level`; every text is shown as it is; ends in no line break."""
    return "\n\n".join(_paragraphs(block, level))


def _paragraphs(block: Block, level: int) -> Iterator[str]:
    yield f"{'#' * level} {escape(block.title)}"
    yield from map(escape, block.text)
    for one in block.tables:
        if not one.title:
            numeric = [place for place in range(len(one.headings)) if place not in one.left]
            yield table([escape(heading) for heading in one.headings], map(_cells, one.rows), right=numeric)
    if block.findings:
        yield bullets(map(escape, block.findings))
    if block.code:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.code)), default=0))
        yield f"{fence}\n{block.code.rstrip()}\n{fence}"
    for part in block.parts:
        if not part.is_folded:
            yield from _paragraphs(part, level + 1)


def _cells(row: Sequence[str | Named]) -> list[str]:
    return [escape(shown(cell)) for cell in row]


def shown(cell: str | Named) -> str:
    """The text of a cell, its definition left out."""
    return cell.text if isinstance(cell, Named) else cell
