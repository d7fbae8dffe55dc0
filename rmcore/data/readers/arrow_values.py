"""Columns of Arrow whose values pyarrow gives in another form than JSON has: JSON texts, and maps as lists of pairs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from rmcore.data.readers.fields import json_or_unread
from rmcore.data.readers.json_stream import RepeatedKeyError

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
        return lambda text: None if text is None else json_or_unread(text)
    if pa.types.is_map(kind):
        return _of_map(_plain(kind.item_type))
    if pa.types.is_struct(kind):
        fields = plain_columns(pa.schema(list(kind)))
        return _of_struct(fields) if fields else None
    if isinstance(kind, _LISTS):
        item = _plain(kind.value_type)
        return None if item is None else lambda value: value and [item(one) for one in value]
    return None


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
    return lambda value: value and {name: fields[name](one) if name in fields else one for name, one in value.items()}
