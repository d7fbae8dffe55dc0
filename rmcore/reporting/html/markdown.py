"""Markdown for Prefect's artifact view, a terminal and the log of experiments."""

import re
from collections.abc import Collection, Iterable, Sequence

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def escape(text: str) -> str:
    """One line of Markdown that shows `text` as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.splitlines()))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """A table of cells that are Markdown already, the columns `right` aligned there; no line break at its end."""
    rule = ("---:" if place in right else "---" for place in range(len(headings)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, tuple(rule), *rows))


def bullets(lines: Iterable[str]) -> str:
    """One item a line, each Markdown already."""
    return "\n".join(f"- {line}" for line in lines)
