"""Rows of a source that give no pair, each with its reason, and columns that look like parts of the prompt."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.pair import Prompt, prompt_text
from rmcore.data.readers.columns import spelling
from rmcore.data.readers.fields import Reason, is_empty
from rmcore.data.readers.records import RejectedRow

_NAMED_PAIRS = 5
INCOMPLETE = frozenset(
    (Reason.MISSING_CHOSEN, Reason.MISSING_REJECTED, Reason.EMPTY_CHOSEN, Reason.EMPTY_REJECTED,
     Reason.NO_FINAL_ASSISTANT_TURN)
)  # fmt: skip
"""Why a record of a whole pair is incomplete: one of its two completions is not there."""
INCOMPLETE_SIDES = INCOMPLETE | {
    *(Reason.NO_PAIR_ID, Reason.UNKNOWN_ROLE, Reason.ROLE_CONTRADICTS_LABEL, Reason.OTHER_SIDE_MISSING),
    *(Reason.ONE_SIDE_TWICE, Reason.MORE_THAN_TWO_ROWS, Reason.PROMPTS_DIFFER),
}
"""Why rows of one side each are incomplete: they are not one chosen and one rejected completion of one prompt."""


def refuse_incomplete(source: str, rejected: Sequence[RejectedRow], reasons: frozenset[Reason]) -> None:
    """Raise where a pair was set aside for one of `reasons`.

    Raises:
        DataError: names the first such pairs and counts all by reason.
    """
    pairs: dict[str, list[RejectedRow]] = {}
    for row in rejected:
        if row.reason in reasons:
            pairs.setdefault(f"id {row.pair_id}" if row.pair_id else f"row {row.row}", []).append(row)
    if not pairs:
        return
    named = [
        f"{rows[0].pair_id or 'without pair_id'} (row {', '.join(str(row.row) for row in rows[:3])})"
        for rows in list(pairs.values())[:_NAMED_PAIRS]
    ]
    reasons_of_pairs = counted(rows[0].reason for rows in pairs.values())
    raise DataError(
        f"{source}: {len(pairs)} pairs are incomplete ({reasons_of_pairs}); the first are "
        f"{', '.join(named)}. data.require_complete_pairs makes that an error: add what is missing, or turn it off, "
        "and such rows are set aside and counted."
    )


def counted(reasons: Iterable[str] | Counter[str]) -> str:
    """The reasons of rows, one each or counted, most frequent first: `empty prompt: 3, prompts differ: 1`."""
    return ", ".join(f"{reason}: {count}" for reason, count in Counter(reasons).most_common())


PARTS = frozenset(
    ("system", "systemprompt", "systemmessage", "developer", "instruction", "instructions", "input", "inputs",
     "question", "query", "context", "contexts", "history", "tools", "functions", "documents", "passage", "passages",
     "attachments", "image", "images", "video", "videos", "audio", "audios", "chattemplatekwargs")
)  # fmt: skip
"""Spellings of names, see `spelling`."""
LOOKED_AT = 100
"""Rows that are looked at: a column that matters is in all of them."""


def unread_columns(source: str, rows: Iterable[tuple[Prompt, Mapping[str, Any]]]) -> list[str]:
    """Say which columns of the first rows look like parts of the prompt and were not read.

    A text that the prompt contains was read: some data sets repeat the question in a column of its own.

    Args:
        source: its name, for the sentence.
        rows: prompts, each with the columns of its row that were not read.
    """
    first = list(islice(rows, LOOKED_AT))
    names = Counter(name for prompt, columns in first for name in _unread(prompt, columns))
    if not names:
        return []
    named = ", ".join(f"{name!r} (in {count} of the first {len(first)})" for name, count in names.items())
    return [
        f"columns of {source} that look like parts of the prompt are not read, so no model sees them: {named}. "
        "Put their content into the prompt (a system turn, or text of the user's turn) or, if they are options of the "
        "chat template, into the model's template; or drop or rename them."
    ]


def _unread(prompt: Prompt, columns: Mapping[str, Any]) -> Iterable[str]:
    text = prompt_text(prompt)
    for name, value in columns.items():
        content = value.strip() if isinstance(value, str) else value
        if spelling(name) in PARTS and not is_empty(value) and not (isinstance(content, str) and content in text):
            yield name
