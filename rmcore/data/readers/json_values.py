"""JSON text as values, one at a time; an object that names a key twice is none."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")


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


def json_values(text: str) -> Iterator[Any]:
    """The objects of a text that follow one another, or the elements of its one array.

    In place of one in which an object names a key twice a `RepeatedKeyError` is given.

    Raises:
        ValueError: the text is cut off, damaged, or neither of both.
    """
    place = _behind_space(text, 0)
    first = text[place : place + 1]
    while first == "{" and place < len(text):
        value, place = _value(text, place)
        yield value
    if first in ("{", ""):
        return
    if first != "[":
        raise ValueError(f"it starts with {first!r} and not with an array or object")
    place = _behind_space(text, place + 1)
    is_open = text[place : place + 1] != "]"
    while is_open:
        value, place = _value(text, place)
        yield value
        is_open = text[place : place + 1] == ","
        place = _behind_space(text, place + is_open)
    if text[place : place + 1] != "]":
        raise ValueError("the array is not closed")
    place = _behind_space(text, place + 1)
    if place < len(text):
        raise ValueError(f"{text[place]!r} comes after the end of the array")


def _value(text: str, place: int) -> tuple[Any, int]:
    """The value that starts at a place, and the place behind it and the white space that follows."""
    try:
        value, end = _DECODER.raw_decode(text, place)
    except RepeatedKeyError as error:
        value, end = error, _ANY_DECODER.raw_decode(text, place)[1]
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value, _behind_space(text, end)


def _behind_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place
