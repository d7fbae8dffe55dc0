"""JSON text parsed one value at a time from a stream, so that an array larger than memory can be read.

Python's own parser wants the whole text. Here a buffer grows until the value at its start parses, and what was parsed
is dropped: memory is bounded by the largest single value.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

MAX_VALUE_CHARACTERS = 64 * 2**20
"""Largest single value. A longer one is a file of another kind, and would have to fit into memory."""
_READ_CHARACTERS = 2**20
_WHITESPACE = re.compile(r"[ \t\n\r]*")


class JsonText:
    """A JSON text parsed one value at a time from a stream, so that an array larger than memory can be read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._buffer = ""
        self._position = 0
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            match = _WHITESPACE.match(self._buffer, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._read_more():
                return ""

    def skip(self) -> None:
        """Step over one character."""
        self._position += 1

    def value(self) -> Any:
        """The value that starts here. Raises ValueError where there is none."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._position)
            except (ValueError, RecursionError) as error:
                if len(self._buffer) - self._position > MAX_VALUE_CHARACTERS or not self._read_more():
                    raise ValueError(str(error)) from error
                continue
            if end == len(self._buffer) and self._read_more():
                continue  # `12` at the end of what was read may go on as `123`
            self._position = end
            return value

    def _read_more(self) -> bool:
        rest = self._buffer[self._position :]
        chunk = self._stream.read(max(_READ_CHARACTERS, len(rest)))  # doubling: parsing again stays linear in all
        self._buffer, self._position = rest + chunk, 0
        return bool(chunk)


def array_values(text: JsonText) -> Iterator[Any]:
    """The elements of the array that starts here. Raises ValueError where it is not a whole, closed array."""
    if text.peek() != "[":
        raise ValueError(f"it starts with {text.peek()!r} and not with an array or object")
    text.skip()
    if text.peek() != "]":
        yield text.value()
        while text.peek() == ",":
            text.skip()
            text.peek()  # over the white space, which raw_decode does not skip
            yield text.value()
    if text.peek() != "]":
        raise ValueError("the array is not closed")
    text.skip()
    if text.peek():
        raise ValueError(f"{text.peek()!r} stands behind the end of the array")
