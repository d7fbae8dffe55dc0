"""Text from elsewhere on a terminal or in a spreadsheet: a data file, a file's name or a server must not drive it."""

import re
from typing import TypeVar


def printable(text: str) -> str:
    """Put a question mark for what of a line cannot be printed, such as the escapes that a terminal obeys."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.replace("\u00a0", " "))


def printable_lines(text: str) -> str:
    """Make each line of a text printable."""
    return "\n".join(map(printable, text.split("\n")))


Value = TypeVar("Value")
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""How a formula begins for some program (OWASP, CSV injection), behind the apostrophes that we, or others, wrote."""


def for_spreadsheets(value: Value) -> Value:
    """Return a value, with an apostrophe in front of a text that a spreadsheet may take for a formula.

    >>> for_spreadsheets("=1+1"), for_spreadsheets("1+1"), for_spreadsheets(-1.5)
    ("'=1+1", '1+1', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value  # type: ignore[return-value]


def from_spreadsheets(text: str) -> str:
    """Return the text that `for_spreadsheets` was given; also of a cell whose apostrophe a spreadsheet took away.

    >>> from_spreadsheets("'=1+1"), from_spreadsheets("=1+1"), from_spreadsheets("'tis")
    ('=1+1', '=1+1', "'tis")
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text
