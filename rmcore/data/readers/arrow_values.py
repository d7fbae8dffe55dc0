"""Columns of Arrow whose values pyarrow gives in another form than JSON has: JSON texts, and maps as lists of pairs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from rmcore.data.readers.fields import UnreadText
from rmcore.data.readers.json_stream import RepeatedKeyError, parse_json

Plain = Callable[[Any], Any]
"""A value as pyarrow gives it in, the value as JSON has it out."""
_JSON = "arrow.json"
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def plain_columns(schema: pa.Schema) -> dict[str, Plain]:
    """Return how the values of a schema's columns become plain ones; columns whose values are plain are not in it."""
    found = ((field.name, _plain(field.type)) for field in schema)
    return {name: plain for name, plain in found if plain is not None}


def _plain(kind: pa.DataType) -> Plain | None:
    if getattr(kind, "extension_name", None) == _JSON:
        return _from_json
    if pa.types.is_map(kind):
        return _of_map(_plain(kind.item_type))
    if pa.types.is_struct(kind):
        fields = plain_columns(pa.schema(list(kind)))
        return _of_struct(fields) if fields else None
    if isinstance(kind, _LISTS):
        item = _plain(kind.value_type)
        return None if item is None else lambda value: value and [item(one) for one in value]
    return None


def _from_json(text: Any) -> Any:
    """The value of a JSON text; one that is no JSON is an `UnreadText`, which no layout takes for an answer."""
    try:
        return None if text is None else parse_json(text)
    except RepeatedKeyError:
        raise
    except (ValueError, RecursionError):
        return UnreadText(text)


def _of_map(item: Plain | None) -> Plain:
    def plain(value: Any) -> Any:
        if value is None:
            return None
        found = {str(key): one if item is None else item(one) for key, one in value}
        if len(found) < len(value):
            raise RepeatedKeyError(Counter(str(key) for key, _ in value).most_common(1)[0][0])
        return found

    return plain


def _of_struct(fields: dict[str, Plain]) -> Plain:
    return lambda value: value and {name: fields.get(name, _same)(one) for name, one in value.items()}


def _same(value: Any) -> Any:
    return value
