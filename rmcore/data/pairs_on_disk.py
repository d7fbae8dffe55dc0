"""Pairs and observations that lie on disk and look like a list: what a data set larger than memory is read into.

The rows have a `RecordSchema` and are an Arrow file that is mapped into memory: the system keeps what is in use. A
choice of them (a split, those under a cap) is an array of row numbers, eight bytes each, over one file.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, overload

import numpy as np
import pyarrow as pa

from rmcore.core.arrays import IntArray
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.parquet_rows import ROWS_A_BATCH, Record, RecordSchema, not_unicode, write_tables
from rmcore.data.table import prompt_of_row

ROWS_A_STRETCH = 1024
"""Rows of the file that are looked through together for those that are wanted: Arrow joins them in memory."""


class RowsOnDisk(Sequence[Record]):
    """Records of one file, in some order; equal to those that were written. See `RowWriter`."""

    def __init__(self, schema: RecordSchema[Record], table: pa.Table, rows: IntArray) -> None:
        self._schema, self._table, self._rows = schema, table, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Record: ...
    @overload
    def __getitem__(self, place: slice) -> "RowsOnDisk[Record]": ...
    def __getitem__(self, place: int | slice) -> "Record | RowsOnDisk[Record]":
        if isinstance(place, slice):
            return RowsOnDisk(self._schema, self._table, self._rows[place])
        return self._schema.from_row(self._table.slice(int(self._rows[place]), 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Record]:
        """In order, some hundred at a time."""
        for batch in self._batches():
            yield from map(self._schema.from_row, batch.to_pylist())

    def take(self, places: IntArray) -> "RowsOnDisk[Record]":
        """The records at these places, which count from 0."""
        return RowsOnDisk(self._schema, self._table, self._rows[places])

    def write_parquet(self, path: Path) -> None:
        """Write the rows as they are: the file that `rmcore.data.parquet_rows.write_records` writes of the records."""
        write_tables(self._schema, self._batches(), path)

    def prompts(self) -> Iterator[Prompt]:
        """Their prompts in order, read without the rest."""
        for batch in RowsOnDisk(self._schema, self._table.select(["prompt"]), self._rows)._batches():
            yield from map(prompt_of_row, batch["prompt"].to_pylist())

    def _batches(self) -> Iterator[pa.Table]:
        """The rows, some hundred a table; what is far apart in the file is copied from where it is, bit by bit."""
        for start in range(0, len(self._rows), ROWS_A_BATCH):
            rows = self._rows[start : start + ROWS_A_BATCH]
            stretch = rows // ROWS_A_STRETCH
            ends = [*(np.flatnonzero(np.diff(stretch)) + 1).tolist(), len(rows)]
            firsts = [0, *ends[:-1]]
            yield pa.concat_tables(
                self._table.slice(at := int(stretch[first]) * ROWS_A_STRETCH, ROWS_A_STRETCH).take(rows[first:end] - at)
                for first, end in zip(firsts, ends, strict=True)
            )


@dataclass
class RowWriter(Generic[Record]):
    """Collects records in a file: `extend` it inside a `with` block, then `rows` reads them.

    Raises:
        DataError: a text is not valid Unicode (a lone surrogate).
    """

    path: Path
    schema: RecordSchema[Record]
    num_rows: int = 0

    def __enter__(self) -> "RowWriter[Record]":
        self._waiting: list[dict[str, Any]] = []
        self._writer = pa.ipc.new_file(str(self.path), self.schema.columns)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._write()
        finally:
            self._writer.close()

    def __len__(self) -> int:
        return self.num_rows

    def extend(self, records: Iterable[Record]) -> None:
        """Add records at the end."""
        for record in records:
            self._waiting.append(self.schema.to_row(record))
            self.num_rows += 1
            if len(self._waiting) == ROWS_A_BATCH:
                self._write()

    def rows(self) -> RowsOnDisk[Record]:
        """All of them, once the block has ended."""
        table = pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()
        return RowsOnDisk(self.schema, table, np.arange(table.num_rows, dtype=np.int64))

    def _write(self) -> None:
        rows, self._waiting = self._waiting, []
        try:
            self._writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=self.schema.columns))
        except UnicodeEncodeError as error:
            raise not_unicode(self.schema, error) from error


def prompts_of(records: Sequence[PreferencePair] | Sequence[Observation]) -> Iterator[Prompt]:
    """The prompts of records in order; of those on disk nothing else is read."""
    return records.prompts() if isinstance(records, RowsOnDisk) else (one.prompt for one in records)


def select(records: Sequence[Record], places: IntArray) -> Sequence[Record]:
    """The records at these places, in that order: a list of a list's, and on disk those of records on disk."""
    if not records:
        return records
    if isinstance(records, RowsOnDisk):
        return records.take(places)
    return [records[place] for place in places.tolist()]
