"""JSON text parsed one value at a time from a stream, so that an array larger than memory can be read.

Python's own parser wants the whole text. Here a buffer grows until the value at its start parses, and what was parsed
is dropped: memory is bounded by the largest single value.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

MAX_VALUE_CHARACTERS = 64 * 2**20
"""Largest single value. A longer one is a file of another kind, and would have to fit into memory."""
_READ_CHARACTERS = 2**20
_WHITESPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class RepeatedKey:
    """Stands for a JSON value in which an object names a key twice: which of the two is meant is unknown."""

    key: str


class RepeatedKeyError(ValueError):
    """A JSON object names a key twice."""


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


class JsonText:
    """A JSON text parsed one value at a time from a stream, so that an array larger than memory can be read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._buffer = ""
        self._position = 0

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
        """The value that starts here, or a `RepeatedKey`. Raises ValueError where there is none."""
        while True:
            try:
                value, end = self._decoded()
            except (ValueError, RecursionError) as error:
                if len(self._buffer) - self._position > MAX_VALUE_CHARACTERS or not self._read_more():
                    raise ValueError(str(error)) from error
                continue
            if end == len(self._buffer) and self._read_more():
                continue  # `12` at the end of what was read may continue as `123`
            self._position = end
            return value

    def _decoded(self) -> tuple[Any, int]:
        """The value that starts here and the place behind it."""
        try:
            return _DECODER.raw_decode(self._buffer, self._position)
        except RepeatedKeyError as error:
            return RepeatedKey(str(error)), _ANY_DECODER.raw_decode(self._buffer, self._position)[1]

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
        raise ValueError(f"{text.peek()!r} comes after the end of the array")
