"""JSON text parsed one value at a time from a stream, so that an array larger than memory can be read.

Python's own parser wants the whole text. Here a buffer grows until the value at its start parses, and what was parsed
is dropped: memory is bounded by the largest single value.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

MAX_VALUE_CHARACTERS = 64 * 2**20
"""Largest single value. A longer one is a file of another kind, and would have to fit into memory."""
_READ_CHARACTERS = 2**20
_NO_SPACE = re.compile(r"[^ \t\n\r]")


class RepeatedKeyError(ValueError):
    """A JSON object names a key twice: which of the two is meant is unknown."""


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(items)
    if len(fields) < len(items):
        raise RepeatedKeyError(Counter(key for key, _ in items).most_common(1)[0][0])
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_ANY_DECODER = json.JSONDecoder()


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON; a `RepeatedKeyError` where an object in it names a key twice.
    """
    return _DECODER.decode(text)


def json_values(stream: TextIO) -> Iterator[Any]:
    """The objects of a text that follow one another, or the elements of its one array, as they are read.

    In place of one in which an object names a key twice a `RepeatedKeyError` is given.

    Raises:
        ValueError: the text is cut off, damaged, or neither of both.
    """
    text = _Text(stream)
    first = text.peek()
    while first == "{" and text.peek():
        yield text.value()
    if first in ("{", ""):
        return
    if first != "[":
        raise ValueError(f"it starts with {first!r} and not with an array or object")
    text.place += 1
    if text.peek() != "]":
        yield text.value()
        while text.peek() == ",":
            text.place += 1
            text.peek()  # over the white space, which raw_decode does not skip
            yield text.value()
    if text.peek() != "]":
        raise ValueError("the array is not closed")
    text.place += 1
    if text.peek():
        raise ValueError(f"{text.peek()!r} comes after the end of the array")


class _Text:
    """The text from `place` on, of which as much is read as the value that starts there needs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._buffer, self.place = stream, "", 0

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            if match := _NO_SPACE.search(self._buffer, self.place):
                self.place = match.start()
                return match[0]
            self.place = len(self._buffer)
            if not self._read_more():
                return ""

    def value(self) -> Any:
        """The value that starts here. Raises ValueError where there is none."""
        while True:
            try:
                value, end = self._decoded()
            except (ValueError, RecursionError) as error:
                if len(self._buffer) - self.place > MAX_VALUE_CHARACTERS or not self._read_more():
                    raise ValueError(str(error)) from error
                continue
            if end == len(self._buffer) and self._read_more():
                continue  # `12` at the end of what was read may continue as `123`
            self.place = end
            return value

    def _decoded(self) -> tuple[Any, int]:
        """The value that starts here and the place behind it."""
        try:
            return _DECODER.raw_decode(self._buffer, self.place)
        except RepeatedKeyError as error:
            return error, _ANY_DECODER.raw_decode(self._buffer, self.place)[1]

    def _read_more(self) -> bool:
        rest = self._buffer[self.place :]
        chunk = self._stream.read(max(_READ_CHARACTERS, len(rest)))  # doubling: parsing again stays linear in all
        self._buffer, self.place = rest + chunk, 0
        return bool(chunk)
