"""Rows that gave no pair: kept with number, reason and beginning, and the switch that makes half a pair an error."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rmcore.core.errors import DataError
from rmcore.data.readers.fields import Reason, RowRejected, pair_id_value
from rmcore.data.readers.files import RawRecord

_EXCERPT_CHARACTERS = 200
_NAMED_PAIRS = 5
INCOMPLETE = frozenset((Reason.MISSING_CHOSEN, Reason.MISSING_REJECTED, Reason.EMPTY_CHOSEN, Reason.EMPTY_REJECTED)) | {
    Reason.NO_FINAL_ASSISTANT_TURN
}
"""Why a record of a whole pair is incomplete: one of its two completions is not there."""
INCOMPLETE_SIDES = INCOMPLETE | {
    Reason.NO_PAIR_ID,
    Reason.UNKNOWN_ROLE,
    Reason.ROLE_CONTRADICTS_LABEL,
    Reason.OTHER_SIDE_MISSING,
    Reason.ONE_SIDE_TWICE,
    Reason.MORE_THAN_TWO_ROWS,
    Reason.PROMPTS_DIFFER,
}
"""Why rows of one side each are incomplete: they are not one chosen and one rejected completion of one prompt."""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that gave no pair: its number (from 1; the line of a JSON Lines file), why, and how it begins."""

    row: int
    reason: str
    excerpt: str
    pair_id: str | None = None
    """As the row itself has it; None where it has none."""


def reject(record: RawRecord, reason: Reason) -> RejectedRow:
    """The record set aside, with the start of every column, since the bad one may stand behind a long good one."""
    fields, text = record.fields or {}, record.excerpt
    if record.fields is not None:
        share = max(20, _EXCERPT_CHARACTERS // max(1, len(fields)) - 10)
        text = ", ".join(f"{name}={str(value)[:share]!r}" for name, value in fields.items())
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")  # a file in UTF-8 holds valid Unicode alone
    try:
        pair_id = pair_id_value(fields.get("pair_id")) or None
    except RowRejected:  # no valid Unicode
        pair_id = None
    return RejectedRow(record.row, str(reason), encodable[:_EXCERPT_CHARACTERS], pair_id)


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
    raise DataError(
        f"{source}: {len(pairs)} pairs are incomplete ({counted(rows[0] for rows in pairs.values())}); the first are "
        f"{', '.join(named)}. data.require_complete_pairs makes that an error: add what is missing, or turn it off, "
        "and such rows are set aside and counted."
    )


def counted(rejected: Iterable[RejectedRow]) -> str:
    """The reasons of rows, most frequent first: `empty prompt: 3, prompts differ: 1`."""
    return ", ".join(f"{reason}: {count}" for reason, count in Counter(row.reason for row in rejected).most_common())
