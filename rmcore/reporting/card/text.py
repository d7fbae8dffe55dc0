"""Texts of a model card: what is Markdown, and everything else, which is shown as it is."""

import unicodedata

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
