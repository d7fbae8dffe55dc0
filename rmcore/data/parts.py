"""A source in parts of bounded size, each read when it is needed: for sources that are larger than memory.

A source gives preference pairs, or rows with columns prompt and response. Parts are cut after a number of them, the
same ones each time, so that work on them can be continued.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.readers.columns import USUAL_COLUMNS, ColumnMap
from rmcore.data.readers.fields import Reason, RowRejected, json_ready
from rmcore.data.readers.layouts import GRADED_ROWS, SIDE_ROWS
from rmcore.data.readers.records import RawRecord
from rmcore.data.readers.row_pairs import asked_and_answered
from rmcore.data.readers.sources import iter_records, load_pairs, probe
from rmcore.data.readers.turns import OF_THE_PROMPT
from rmcore.data.readers.unread import LOOKED_AT, counted, unread_columns


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a source: pairs, or (prompt, response) rows; the others are none."""

    number: int
    """From 0."""
    pairs: Sequence[PreferencePair] = ()
    responses: list[tuple[Prompt, str]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Row of the source that each response is in, from 1; the line of a JSON Lines file."""
    columns: list[dict[str, Any]] = field(default_factory=list)
    """Everything else in that row, JSON-ready."""

    def __len__(self) -> int:
        """Pairs, or responses."""
        return len(self.pairs) + len(self.responses)


@dataclass
class SourceInParts:
    """Iterates over the parts of a source; `num_rows` and `num_unusable` count what was read so far.

    Args:
        source: a file, a `datasets` folder, or a hub name.
        size: pairs or responses of a part; the last one may have fewer.
        split: which split of a folder or hub data set; a file has none.
        columns: names of the columns of pairs, where they are not the usual ones.
        limit: stop after this many pairs, or after this many rows of responses.
    """

    source: str
    size: int
    split: str = "train"
    columns: ColumnMap = USUAL_COLUMNS
    limit: int | None = None
    num_rows: int = 0
    num_unusable: int = 0
    notices: list[str] = field(default_factory=list)
    """Sentences about rows that are not among the pairs; whole when all parts were read."""

    def __iter__(self) -> Iterator[Part]:
        """The parts, in order; memory holds one at a time, or all where each row is one side of a pair.

        Raises:
            DataError: the source cannot be read, its columns fit no layout, or no row of it can be used.
        """
        self.num_rows = self.num_unusable = 0
        self.notices = []
        records = iter_records(self.source, split=self.split)
        head: list[RawRecord] = []
        for record in records:  # what cannot be read at all tells nothing
            head.append(record)
            if record.fields:
                break
        again = chain(head, records)
        yield from self._responses(again) if head and _is_response(head[-1]) else self._pairs(again)

    @property
    def _most(self) -> int | None:
        """The limit as `islice` takes it."""
        return None if self.limit is None else min(self.limit, sys.maxsize)

    def _responses(self, records: Iterator[RawRecord]) -> Iterator[Part]:
        part = Part(0)
        reasons: Counter[str] = Counter()
        looked_at: list[tuple[Prompt, dict[str, Any]]] = []
        for record in islice(records, self._most):
            self.num_rows += 1
            try:
                response = _response_of(record)
                fields = (record.fields or {}).items()
                columns = {name: json_ready(value) for name, value in fields if name not in ("prompt", "response")}
            except RowRejected as rejection:
                self.num_unusable += 1
                reasons[rejection.reason] += 1
                continue
            part.responses.append(response)
            part.rows.append(record.row)
            part.columns.append(columns)
            if len(looked_at) < LOOKED_AT:
                unread = {name: value for name, value in columns.items() if name not in OF_THE_PROMPT}
                looked_at.append((response[0], unread))
            if len(part) == self.size:
                yield part
                part = Part(part.number + 1)
        if len(part):
            yield part
        elif not part.number:
            raise _nothing_to_score(self.source, self.num_rows, reasons)
        self.notices = unread_columns(self.source, looked_at)
        if reasons:
            self.notices += [f"{self.num_unusable:,} rows of {self.source} are set aside ({counted(reasons)})."]

    def _pairs(self, records: Iterator[RawRecord]) -> Iterator[Part]:
        reading = probe(records, self.source, self.columns)
        # Sides of a pair, and answers to a prompt, may be anywhere: all rows are read before any pair is whole.
        if reading.layout.name in (SIDE_ROWS, GRADED_ROWS):
            loaded = load_pairs(self.source, split=self.split, columns=self.columns, limit=self.limit)
            self.num_rows, self.num_unusable = loaded.num_rows, len(loaded.rejected)
            self.notices = loaded.notices()
            for number, start in enumerate(range(0, len(loaded.pairs), self.size)):
                yield Part(number, pairs=loaded.pairs[start : start + self.size])
            return
        pairs = islice((pair for rows in reading for row in rows for pair in row.pairs), self._most)
        unread: list[str] = []
        num_given = 0
        for number, part in enumerate(iter(lambda: list(islice(pairs, self.size)), [])):
            unread = unread or unread_columns(self.source, ((pair.prompt, pair.metadata) for pair in part))
            self.num_rows, self.num_unusable = reading.num_rows, len(reading.rejected) + reading.num_ties
            yield Part(number, pairs=part)
            num_given += len(part)
        self.num_rows, self.num_unusable = reading.num_rows, len(reading.rejected) + reading.num_ties
        reading.check_usable(num_given)
        self.notices = reading.loaded((), (), unread).notices(num_given)


def _is_response(record: RawRecord) -> bool:
    """Whether a record is a prompt with one response, and no pair or side of one."""
    fields = record.fields or {}
    return "response" in fields and not ("pair_id" in fields and ("role" in fields or "label" in fields))


def _response_of(record: RawRecord) -> tuple[Prompt, str]:
    """Prompt and response, read as in rows of pairs; RowRejected where one is missing, blank, or no text."""
    if record.fields is None:
        raise RowRejected(record.problem or Reason.MISSING_VALUE)
    return asked_and_answered(record.fields)


def _nothing_to_score(source: str, num_rows: int, reasons: Counter[str]) -> DataError:
    return DataError(
        f"none of the {num_rows} rows of {source} has a usable prompt and response ({counted(reasons)}), so nothing "
        "can be scored. Correct the file."
    )
