"""Nested records (the data audit, truncation counts) as tables, whatever their keys are.

Scalars become rows; dicts that share a shape become one table, side by side; the rest is unfolded level by level.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Table

_SHARE_WORDS = ("accuracy", "rate", "share", "fraction", "ceiling")
_SENTENCE = 60  # characters from which a list of strings is shown as a list, not in a row
_MOST_ROWS = 50


def record_blocks(record: Mapping[str, Any], title: str) -> list[Block]:
    """`record` as blocks in reading order: its own scalars first, under `title`, then one or more blocks a child.

    A block is one table, or a list of sentences; detail is folded.
    """
    scalars: list[list[str]] = []
    children: list[Block] = []
    for key, value in record.items():
        if _is_scalar(value):
            scalars.append([label(key), scalar_text((title, key), value)])
        elif not value:
            scalars.append([label(key), "none"])
        elif isinstance(value, Mapping):
            children += _mapping_blocks(value, label(key))
        else:
            children += _list_blocks(value, label(key), scalars)
    of_scalars = [Block(title, tables=(Table(("", ""), scalars),))] if scalars else []
    return [block for block in (*of_scalars, *children) if block.tables or block.findings]


def label(key: str) -> str:
    """A key as words: `num_prompts` is prompts."""
    return str(key).removeprefix("num_").replace("_", " ")


def scalar_text(path: Sequence[str], value: Any) -> str:
    """A leaf as text; fractions under a key that speaks of a share or an accuracy become percentages."""
    if isinstance(value, Mapping):
        text = scalar_text(path, value["value"])
        bounds = numbers.interval(value, "share" if text.endswith("%") else "")
        return f"{text} ({bounds})" if bounds else text
    if value is None:
        return numbers.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) > 1):
        return numbers.count(value)
    if isinstance(value, float):
        is_share = 0 <= value <= 1 and any(word in part for part in path for word in _SHARE_WORDS)
        return numbers.percent(value) if is_share else numbers.decimal(value)
    return str(value)


def _is_scalar(value: Any) -> bool:
    """A leaf; a metric record {value, ci_low, ci_high, ...} is one too."""
    if isinstance(value, Mapping):
        return {"value", "ci_low", "ci_high"} <= set(value)
    return not isinstance(value, list | tuple)


def _mapping_blocks(record: Mapping[str, Any], title: str) -> list[Block]:
    values = list(record.values())
    if not all(isinstance(value, Mapping) and not _is_scalar(value) for value in values):
        return record_blocks(record, title)
    if all(_is_scalar(leaf) for value in values for leaf in value.values()):
        names, rows = _grid(list(record), values, title)
        return [Block(title, tables=(Table(names, rows),))]
    return _comparison(record, title)


def _grid(names: Sequence[str], records: Sequence[Mapping[str, Any]], title: str) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: one row a record, one column a key."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    rows = [
        [label(name), *(scalar_text((title, key), record.get(key)) for key in keys)]
        for name, record in zip(names, records, strict=True)
    ]
    return ["", *map(label, keys)], rows


def _comparison(record: Mapping[str, Mapping[str, Any]], title: str) -> list[Block]:
    """One column an entry of `record`, one row a leaf; grids inside become folded blocks of their own."""
    leaves: dict[str, dict[str, str]] = {}
    deeper: list[Block] = []
    for name, entry in record.items():
        for key, value in entry.items():
            if _is_scalar(value):
                leaves.setdefault(label(key), {})[name] = scalar_text((title, key), value)
            elif isinstance(value, Mapping) and all(_is_scalar(leaf) for leaf in value.values()):
                for leaf, number in value.items():
                    text = scalar_text((title, key, leaf), number)
                    leaves.setdefault(f"{label(key)}: {label(leaf)}", {})[name] = text
            else:
                inner = record_blocks({key: value}, f"{title} · {name}")
                deeper += [block._replace(title=f"{block.title} ({name})", is_folded=True) for block in inner]
    rows = [[row, *(texts.get(name, numbers.MISSING) for name in record)] for row, texts in leaves.items()]
    return [Block(title, tables=(Table(["", *map(label, record)], rows),) if rows else ()), *deeper]


def _list_blocks(values: Sequence[Any], title: str, scalars: list[list[str]]) -> list[Block]:
    if len(values) > _MOST_ROWS:
        title = f"{title} (the first {_MOST_ROWS} of {numbers.count(len(values))})"
    if all(isinstance(value, Mapping) for value in values):
        flat = [{key: _joined(value) for key, value in record.items()} for record in values[:_MOST_ROWS]]
        names, rows = _grid([""] * len(flat), flat, title)
        return [Block(title, tables=(Table(names[1:], [row[1:] for row in rows]),))]
    texts = [scalar_text((), _joined(value)) for value in values[:_MOST_ROWS]]
    if any(len(text) >= _SENTENCE for text in texts):
        return [Block(title, findings=texts)]
    scalars.append([label(title), ", ".join(texts)])
    return []


def _joined(value: Any) -> Any:
    """A cell: lists are joined, deeper records are written as key: value."""
    if _is_scalar(value):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{label(key)}: {scalar_text((key,), _joined(leaf))}" for key, leaf in value.items()) or "none"
    return " / ".join(scalar_text((), _joined(inner)) for inner in value) or "none"
