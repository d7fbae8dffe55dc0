"""Text from elsewhere on a terminal: a data file, a file's name or a server must not drive it."""


def printable(text: str) -> str:
    """Put a question mark for what of a line cannot be printed, such as the escapes that a terminal obeys."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.replace("\u00a0", " "))


def printable_lines(text: str) -> str:
    """Make each line of a text printable."""
    return "\n".join(map(printable, text.split("\n")))
