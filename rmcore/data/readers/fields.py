"""Values of a raw record: texts, numbers, lists; or the reason why a value is none of these.

One function a kind of value. Each returns the value or raises `RowRejected` with one of a small fixed set of reasons,
so that a bad row is counted under one name however it was stored. Nothing is guessed and nothing is repaired.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.pair import is_blank
from rmcore.data.readers.json_values import RepeatedKeyError, parse_json

_MAX_METADATA_DEPTH = 20


class Reason(StrEnum):
    """Why a row says nothing that can be used."""

    EMPTY_PROMPT = "empty prompt"
    EMPTY_CHOSEN = "empty chosen"
    EMPTY_REJECTED = "empty rejected"
    EMPTY_ANSWER = "empty answer"
    MISSING_CHOSEN = "missing chosen"
    MISSING_REJECTED = "missing rejected"
    MISSING_VALUE = "missing value"
    WRONG_TYPE = "wrong type"
    IDENTICAL_SIDES = "identical sides"
    PROMPTS_DIFFER = "prompts differ"
    INVALID_UTF8 = "invalid UTF-8"
    BROKEN_ESCAPE = "broken \\u escape"
    NOT_JSON = "not valid JSON"
    REPEATED_KEY = "a key is repeated"
    NOT_CSV = "not valid CSV"
    HEADER_AGAIN = "the header again"
    NOT_A_DIALOGUE = "not a dialogue"
    IMAGES = "holds images"
    AUDIO = "holds audio"
    VIDEO = "holds videos"
    NO_TEXT_PART = "a part of a message is no text"
    BAD_TOOLS = "tools are no list of objects"
    TWO_SYSTEM_TEXTS = "two system texts"
    TWO_LISTS_OF_TOOLS = "two lists of tools"
    NO_FINAL_ASSISTANT_TURN = "no final assistant turn"
    BAD_MARGIN = "margin is not a finite number"
    LENGTHS_DIFFER = "answers and ranks differ in number"
    FEWER_THAN_TWO_ANSWERS = "fewer than two answers"
    RANKS_CONTRADICT_SCORES = "ranks contradict scores"
    NO_PAIR_ID = "no pair_id"
    UNKNOWN_ROLE = "unknown role"
    ROLE_CONTRADICTS_LABEL = "role contradicts label"
    OTHER_SIDE_MISSING = "other side missing"
    ONE_SIDE_TWICE = "one side twice"
    MORE_THAN_TWO_ROWS = "more than two rows of one pair"
    MARGINS_DIFFER = "margins differ"
    UNKNOWN_WINNER = "winner not understood"
    NOT_LABELLED = "not labelled"
    BAD_GRADE = "grade is not a finite number"
    NOT_A_LEVEL = "grade is none of the possible ones"
    BAD_BEST = "the best answer is none of the answers"
    BAD_WEIGHT = "weight is not a finite number above 0"


WORDS_FOR_NOTHING = frozenset(("NULL", "null", "None", "NaN", "nan", "N/A", "n/a", "#N/A", "<NA>"))
"""Texts that databases, spreadsheets and pandas write for an empty cell."""
_MISSING = {Reason.EMPTY_CHOSEN: Reason.MISSING_CHOSEN, Reason.EMPTY_REJECTED: Reason.MISSING_REJECTED}


class RowRejected(DataError):
    """A row that gives no pair, with its `reason`."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"this row gives no preference pair: {reason}. Correct or drop the row.")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class UnreadText:
    """A text that holds messages or a list in another notation than JSON: it is no prompt and no answer."""

    text: str

    def __str__(self) -> str:
        return self.text


def text_value(value: Any, empty: Reason | None) -> str:
    """A text; blank ones are refused with `empty`, where that is given."""
    if isinstance(value, str) and value.isascii() and (empty is None or not is_blank(value)):
        return value  # nearly every text
    if not isinstance(value, str) and is_missing(value):
        raise RowRejected(Reason.MISSING_VALUE if empty is None else _MISSING.get(empty, Reason.MISSING_VALUE))
    if not isinstance(value, str | bytes):
        raise RowRejected(Reason.NOT_JSON if isinstance(value, UnreadText) else Reason.WRONG_TYPE)
    try:
        text = value.decode("utf-8") if isinstance(value, bytes) else value
        if not text.isascii():
            text.encode("utf-8")  # lone surrogates: bytes that were not UTF-8, or half of a JSON \u pair
    except UnicodeEncodeError as error:  # bytes that were not UTF-8 are U+DC80 to U+DCFF (`surrogateescape`)
        is_byte = "\udc80" <= error.object[error.start] <= "\udcff"
        raise RowRejected(Reason.INVALID_UTF8 if is_byte else Reason.BROKEN_ESCAPE) from error
    except UnicodeDecodeError as error:
        raise RowRejected(Reason.INVALID_UTF8) from error
    if empty is not None and is_blank(text):
        raise RowRejected(empty)
    return text


def is_missing(value: Any) -> bool:
    """Whether there is no value: null, an empty cell, or the NaN that pandas writes for a missing text."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def pair_id_value(value: Any) -> str:
    """The id of a pair as text; empty where there is none."""
    if value is None or isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return text_value(str(value), None)


def number(value: Any, wrong: Reason) -> float | None:
    """A finite number, None where there is none; text is converted because CSV has nothing else."""
    if is_missing(value):
        return None
    if isinstance(value, bool) and wrong is Reason.BAD_MARGIN:
        raise RowRejected(wrong)
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowRejected(wrong) from error
    if not math.isfinite(converted):
        raise RowRejected(wrong)
    return converted


def grade(value: Any) -> float | None:
    """A finite number, None where it is missing; true is 1 and false 0, also as text."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return float(value.strip().lower() == "true")
    return number(value.strip() if isinstance(value, str) else value, Reason.BAD_GRADE)


def number_list(value: Any, count: int) -> list[float] | None:
    """`count` finite numbers, None where the whole list is absent."""
    if value is None:
        return None
    items = list_value(value)
    if any(isinstance(item, bool) for item in items):
        raise RowRejected(Reason.WRONG_TYPE)
    numbers = [number(item, Reason.WRONG_TYPE) for item in items]
    if len(numbers) != count:
        raise RowRejected(Reason.LENGTHS_DIFFER)
    present = [item for item in numbers if item is not None]
    if len(present) != count:
        raise RowRejected(Reason.MISSING_VALUE)
    return present


def list_value(value: Any) -> list[Any]:
    """A list."""
    if value is None:
        raise RowRejected(Reason.MISSING_VALUE)
    if not isinstance(value, list):
        raise RowRejected(Reason.NOT_JSON if isinstance(value, UnreadText) else Reason.WRONG_TYPE)
    return value


def json_or_text(text: str) -> Any:
    """The JSON value that a text holds, or the text itself where it holds none."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return text


def json_or_unread(text: str) -> Any:
    """The JSON value that a text holds; an `UnreadText` where it holds none.

    Raises:
        RepeatedKeyError: an object in it names a key twice.
    """
    try:
        return parse_json(text)
    except RepeatedKeyError:
        raise
    except (ValueError, RecursionError):
        return UnreadText(text)


def is_empty(value: Any) -> bool:
    """Whether a value holds nothing, also as JSON in a text: CSV has `[]` for an empty list."""
    return not (json_or_text(value.strip()) if isinstance(value, str) else value)


def json_object(value: Any) -> dict[str, Any] | None:
    """An object, also one written as JSON text; None where it is none."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json_or_text(value)
    return value if isinstance(value, dict) else None


def json_ready(value: Any, depth: int = 0) -> Any:
    """`value` as JSON can hold it: dates and the like as text, what is not a finite number as null."""
    if depth > _MAX_METADATA_DEPTH:
        raise RowRejected(Reason.WRONG_TYPE)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | bytes):
        return text_value(value, None)
    if isinstance(value, dict):
        return {text_value(str(name), None): json_ready(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item, depth + 1) for item in value]
    return str(value)
