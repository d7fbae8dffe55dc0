"""Rows of one prompt and one response each: what is scored where there is nothing to compare."""

from collections import Counter

from rmcore.core.errors import DataError
from rmcore.data.pair import Prompt
from rmcore.data.readers.fields import Reason, RowRejected
from rmcore.data.readers.files import RawRecord
from rmcore.data.readers.layouts import asked_and_answered


def is_response(record: RawRecord) -> bool:
    """Whether a record is a prompt with one response, and no pair or side of one."""
    fields = record.fields or {}
    return "response" in fields and not ("pair_id" in fields and ("role" in fields or "label" in fields))


def response_of(record: RawRecord) -> tuple[Prompt, str]:
    """Prompt and response, read as in rows of pairs: a prompt may be turns or a transcript of them.

    Raises:
        RowRejected: one is missing, blank, or holds what is no text.
    """
    if record.fields is None:
        raise RowRejected(record.problem or Reason.MISSING_VALUE)
    return asked_and_answered(record.fields)


def nothing_to_score(source: str, num_rows: int, reasons: Counter[str]) -> DataError:
    """The error of a source none of whose rows is usable; `reasons` counts why."""
    return DataError(
        f"none of the {num_rows} rows of {source} has a usable prompt and response ({counted(reasons)}), so nothing "
        "can be scored. Correct the file."
    )


def counted(reasons: Counter[str]) -> str:
    """Reasons with their counts, the commonest first."""
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
