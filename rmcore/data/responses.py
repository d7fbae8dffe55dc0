"""Rows of one prompt and one response each: what is scored where there is nothing to compare."""

import sys
from dataclasses import dataclass
from itertools import islice

from rmcore.core.errors import DataError
from rmcore.data.readers.fields import Reason, RowRejected, text_value
from rmcore.data.readers.files import RawRecord
from rmcore.data.readers.sources import iter_records


@dataclass(frozen=True, slots=True)
class LoadedResponses:
    """The usable (prompt, response) rows of a source in its order; `num_rows` were read."""

    rows: list[tuple[str, str]]
    num_rows: int

    @property
    def num_unusable(self) -> int:
        """Rows that lack a text, or whose text is blank or not valid Unicode."""
        return self.num_rows - len(self.rows)


def is_response(record: RawRecord) -> bool:
    """Whether a record is a prompt with one response, and no pair or side of one."""
    fields = record.fields or {}
    return "response" in fields and not ("pair_id" in fields and ("role" in fields or "label" in fields))


def response_of(record: RawRecord) -> tuple[str, str] | None:
    """Prompt and response; None where a text is missing, blank or not valid Unicode."""
    fields = record.fields or {}
    try:
        prompt = text_value(fields.get("prompt"), Reason.EMPTY_PROMPT)
        return prompt, text_value(fields.get("response"), Reason.EMPTY_ANSWER)
    except RowRejected:
        return None


def nothing_to_score(source: str, num_rows: int) -> DataError:
    """The error of a source none of whose rows is usable."""
    return DataError(
        f"none of the {num_rows} rows of {source} has a text prompt and response, so nothing can be scored."
    )


def load_responses(source: str, *, split: str = "train", limit: int | None = None) -> LoadedResponses | None:
    """Read the columns `prompt` and `response` of a source; None where it has pairs (see `load_pairs`), or no rows.

    Args:
        source: a file, a `datasets` folder, or a hub name.
        split: which split of a folder or hub data set; a file has none.
        limit: read this many rows at most.

    Raises:
        DataError: the source cannot be read, or has those columns and no row with both texts.
    """
    rows: list[tuple[str, str]] = []
    num_rows = 0
    most = None if limit is None else min(limit, sys.maxsize)  # islice takes no larger number
    for record in islice(iter_records(source, split=split), most):
        if not rows and record.fields and not is_response(record):
            return None
        num_rows += 1
        if (row := response_of(record)) is not None:
            rows.append(row)
    if num_rows and not rows:
        raise nothing_to_score(source, num_rows)
    return LoadedResponses(rows, num_rows) if rows else None
