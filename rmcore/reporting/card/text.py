"""Texts of a model card: what is Markdown, and everything else, which is shown as it is."""

import unicodedata
from collections.abc import Iterable, Sequence

from rmcore.reporting.html.markdown import table
from rmcore.reporting.html.note import plain

NOT_STATED = "not stated"


class Markdown(str):
    """Markdown that was written here. Every other text is data, and the template escapes it."""

    __slots__ = ()


def shown(text: object) -> Markdown:
    """One line that shows `text` as it is: no markup, HTML, formula, or character that reorders or hides others.

    >>> shown("<b>$x$</b>")
    '&#60;b&#62;&#36;x&#36;&#60;/b&#62;'
    """
    if isinstance(text, Markdown):
        return text
    line = " ".join(str(text).split())
    visible = "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign) in ("Cc", "Cf") else sign for sign in line
    )
    return Markdown(plain(visible).replace("$", "&#36;"))


def shown_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> Markdown:
    """A table whose cells are escaped where they are no Markdown."""
    return Markdown(table(headings, ([shown(cell) for cell in row] for row in rows), right=right))
