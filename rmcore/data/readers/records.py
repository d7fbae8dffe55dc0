"""One raw record of a source, its values in one form, whichever format and program they come from.

- Text that holds messages as JSON is parsed; CSV has nothing else, and other formats often hold it, too.
- Turns `{from, value}` (ShareGPT) become `{role, content}`.
- Roles are in small letters: a chat template knows no `User`.
- NaN is no value of a column that a row may lack: pandas has it for a missing text, and JSON of its rows keeps it.
- Columns of Arrow that hold JSON texts are their values.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rmcore.data.readers.columns import ALPACA_COLUMNS, LIST_COLUMNS, spelling
from rmcore.data.readers.fields import (
    Reason,
    RowRejected,
    UnreadText,
    is_missing,
    json_or_unread,
    pair_id_value,
    text_value,
)
from rmcore.data.readers.json_values import RepeatedKeyError
from rmcore.data.readers.turns import OF_THE_PROMPT

EXCERPT_CHARACTERS = 200
_MAY_LACK = frozenset((*OF_THE_PROMPT, *ALPACA_COLUMNS))
_LIST_SPELLINGS = frozenset(map(spelling, LIST_COLUMNS))
_LIST = re.compile(r"\s*\[")
_MESSAGES = re.compile(r"\s*(\[\s*)?\{")
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool", "function")}
_ROLES |= {"human": "user", "gpt": "assistant", "observation": "tool"}

_SPEAKS = re.compile(r"""[{,]\s*['"](role|from)['"]\s*:\s*['"]""")
_SAYS = re.compile(r"""[{,]\s*['"](content|value|tool_calls|function_call)['"]\s*:""")
_KNOWN_SPEAKS = re.compile(rf"""{_SPEAKS.pattern}({"|".join(_ROLES)})['"]""", re.IGNORECASE)
"""A message says something, or has a role that is known: an answer of code may be `[{'from': 'A', 'to': 'B'}]`."""
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)

_Plain = Callable[[Any], Any]
"""A value as pyarrow gives it in, the value as JSON has it out."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One row as it is in the source: `fields` where it could be read, else `problem` says why not.

    `row` counts from 1: the line of a JSON Lines file, the record of the other formats.
    """

    row: int
    fields: dict[str, Any] | None = None
    problem: Reason | None = None
    excerpt: str = ""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that gave no pair: its number (from 1; the line of a JSON Lines file), why, and how it begins."""

    row: int
    reason: str
    excerpt: str
    pair_id: str | None = None
    """As the row itself has it; None where it has none."""


def reject(record: RawRecord, reason: Reason) -> RejectedRow:
    """The record set aside, with the start of every column, since the bad one may be behind a long good one."""
    fields, text = record.fields or {}, record.excerpt
    if record.fields is not None:
        share = max(20, EXCERPT_CHARACTERS // max(1, len(fields)) - 10)
        text = ", ".join(f"{name}={str(value)[:share]!r}" for name, value in fields.items())
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")  # a file in UTF-8 holds valid Unicode alone
    try:
        pair_id = pair_id_value(fields.get("pair_id")) or None
    except RowRejected:  # no valid Unicode
        pair_id = None
    return RejectedRow(record.row, str(reason), encodable[:EXCERPT_CHARACTERS], pair_id)


def record_of(row: int, fields: Mapping[str, Any], plain: Mapping[str, _Plain] | None = None) -> RawRecord:
    """The record of a row whose values could be read, in whatever format."""
    try:
        if not "".join(fields).isascii():
            for name in fields:
                text_value(name, None)
        if plain:
            fields = {name: plain[name](value) if name in plain else value for name, value in fields.items()}
        return RawRecord(row, {name: structured(name, value) for name, value in fields.items()})
    except RowRejected as rejection:
        return RawRecord(row, None, rejection.reason, excerpt(repr(fields)))
    except RepeatedKeyError as error:
        return RawRecord(row, None, Reason.REPEATED_KEY, f"the key {error}")


def arrow_records(batch: pa.RecordBatch | pa.Table, first_row: int) -> Iterator[RawRecord]:
    """The rows of an Arrow batch; a row with invalid text or an unrepresentable value is set aside alone."""
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError) as error:  # UnicodeDecodeError is a ValueError
        if batch.num_rows == 1:
            reason = Reason.INVALID_UTF8 if isinstance(error, UnicodeDecodeError) else Reason.WRONG_TYPE
            reason = Reason.REPEATED_KEY if isinstance(error, KeyError) else reason
            yield RawRecord(first_row, None, reason, str(error))
            return
        for offset in range(batch.num_rows):
            yield from arrow_records(batch.slice(offset, 1), first_row + offset)
        return
    plain = _plain_columns(batch.schema)
    for row, fields in enumerate(rows, start=first_row):
        yield record_of(row, fields, plain)


def excerpt(text: str) -> str:
    """The beginning of a text, as it is shown of a row that cannot be read."""
    return text.strip()[:EXCERPT_CHARACTERS]


def structured(name: str, value: Any) -> Any:
    """The value of a column.

    Text of another kind stays text even where it would parse: an answer may well be `[1, 2]`. Messages that are not
    JSON (Python's own notation, say) are an `UnreadText`, which no layout takes for an answer.

    Raises:
        RepeatedKeyError: an object in the text names a key twice.
    """
    if name in _MAY_LACK and isinstance(value, float) and is_missing(value):
        return None
    if spelling(name) in _LIST_SPELLINGS:
        if isinstance(value, str) and _LIST.match(value):
            value = json_or_unread(value)
        return [_turns(_messages(item)) for item in value] if isinstance(value, list) else value
    if isinstance(value, str) and not _MESSAGES.match(value):
        return value
    return _turns(_messages(value))


def _messages(value: Any) -> Any:
    if not isinstance(value, str) or not _MESSAGES.match(value):
        return value
    if not _SPEAKS.search(value) or not (_SAYS.search(value) or _KNOWN_SPEAKS.search(value)):
        return value
    parsed = json_or_unread(value)
    if isinstance(parsed, UnreadText):
        return parsed
    if isinstance(parsed, dict):  # an object that has a role among other things is as likely an answer
        return parsed if set(parsed) in ({"role", "content"}, {"from", "value"}) else value
    is_turn = [isinstance(turn, dict) and ("role" in turn or {"from", "value"} <= turn.keys()) for turn in parsed]
    return parsed if all(is_turn) else value


def _turns(value: Any) -> Any:
    """A message, or a list of them, with the usual keys and roles; anything else as it is."""
    if isinstance(value, list):
        return [_turns(turn) for turn in value] if value and isinstance(value[0], dict | list) else value
    if not isinstance(value, dict):
        return value
    if value.keys() == {"messages"}:
        return {"messages": _turns(value["messages"])}
    if {"from", "value"} <= value.keys():
        role = _role(value["from"])
        if not isinstance(role, list) and role not in _ROLES.values():
            return value  # no turn, or one of an unknown speaker, which no layout takes for a message
        others = {name: item for name, item in value.items() if name not in ("from", "value")}
        return {"role": role, "content": value["value"], **others}
    return {**value, "role": _role(value["role"])} if "role" in value else value


def _role(role: Any) -> Any:
    """A role by the name that chat templates know it by; `datasets` may store those of all turns as one list."""
    if isinstance(role, list):
        return [_role(item) for item in role]
    return _ROLES.get(role.strip().lower(), role) if isinstance(role, str) else role


def _plain_columns(schema: pa.Schema) -> dict[str, _Plain]:
    """How the values of a schema's columns become plain ones; columns whose values are plain are not in it."""
    by_name = ((field.name, _plain(field.type)) for field in schema)
    return {name: plain for name, plain in by_name if plain is not None}


def _plain(kind: pa.DataType) -> _Plain | None:
    if getattr(kind, "extension_name", None) == "arrow.json":
        return lambda text: None if text is None else json_or_unread(text)
    if pa.types.is_map(kind):
        of_item = _plain(kind.item_type)
        return None if of_item is None else lambda value: value and {key: of_item(item) for key, item in value.items()}
    if pa.types.is_struct(kind):
        fields = _plain_columns(pa.schema(list(kind)))
        return _of_struct(fields) if fields else None
    if isinstance(kind, _LISTS):
        item_of = _plain(kind.value_type)
        return None if item_of is None else lambda value: value and [item_of(item) for item in value]
    return None


def _of_struct(fields: dict[str, _Plain]) -> _Plain:
    return lambda value: (
        value and {name: fields[name](item) if name in fields else item for name, item in value.items()}
    )
