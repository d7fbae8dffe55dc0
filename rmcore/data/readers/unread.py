"""Columns that are called like a part of the prompt, and that no layout reads: a model would never see them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rmcore.data.pair import PreferencePair, Prompt, prompt_text
from rmcore.data.readers.columns import spelling
from rmcore.data.readers.fields import is_empty

PARTS = frozenset(
    ("system", "systemprompt", "systemmessage", "developer", "instruction", "instructions", "input", "inputs",
     "question", "query", "context", "contexts", "history", "tools", "functions", "documents", "passage", "passages",
     "attachments", "image", "images", "video", "videos", "audio", "audios", "chattemplatekwargs")
)  # fmt: skip
"""Spellings of names, see `spelling`."""
LOOKED_AT = 100
"""Rows that are looked at: a column that matters is in all of them."""


def unread_parts(source: str, pairs: Sequence[PreferencePair]) -> list[str]:
    """Say which columns of the first pairs look like parts of the prompt and are in the metadata alone.

    A text that the prompt contains was read: some data sets repeat the question in a column of its own.
    """
    return unread_columns(source, [(pair.prompt, pair.metadata) for pair in pairs[:LOOKED_AT]])


def unread_columns(source: str, rows: Sequence[tuple[Prompt, Mapping[str, Any]]]) -> list[str]:
    """Say the same of rows, each with its prompt and its columns that were not read."""
    found = Counter(name for prompt, columns in rows for name in _unread(prompt, columns))
    if not found:
        return []
    named = ", ".join(f"{name!r} (in {count} of the first {len(rows)})" for name, count in found.items())
    return [
        f"columns of {source} that look like parts of the prompt are not read, so no model sees them: {named}. "
        "Put their content into the prompt (a system turn, or text of the user's turn) or, if they are options of the "
        "chat template, into the model's template; or drop or rename them."
    ]


def _unread(prompt: Prompt, columns: Mapping[str, Any]) -> Iterable[str]:
    text = prompt_text(prompt)
    for name, value in columns.items():
        said = value.strip() if isinstance(value, str) else value
        if spelling(name) in PARTS and not is_empty(value) and not (isinstance(said, str) and said in text):
            yield name
