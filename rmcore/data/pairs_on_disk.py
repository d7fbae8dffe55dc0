"""Pairs that lie on disk and look like a list: what a data set larger than memory is read into.

The rows are those of `rmcore.data.table`, as an Arrow file that is mapped into memory: the system keeps of it what is
in use. A choice of pairs (a split, those under a cap) is an array of row numbers, eight bytes a pair, over one file.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
import pyarrow as pa

from rmcore.core.arrays import IntArray
from rmcore.data.pair import PreferencePair
from rmcore.data.table import (
    ROWS_A_BATCH,
    SCHEMA,
    count_pairs,
    iter_pairs,
    not_unicode,
    pair_of_row,
    row_of_pair,
    write_tables,
)

ROWS_A_STRETCH = 1024
"""Rows of the file that are looked through together for those that are wanted: Arrow joins them in memory."""


class PairsOnDisk(Sequence[PreferencePair]):
    """P pairs of one file, in some order; equal to those that were written. See `PairWriter`."""

    def __init__(self, table: pa.Table, rows: IntArray) -> None:
        self._table, self._rows = table, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> PreferencePair: ...
    @overload
    def __getitem__(self, place: slice) -> "PairsOnDisk": ...
    def __getitem__(self, place: int | slice) -> "PreferencePair | PairsOnDisk":
        if isinstance(place, slice):
            return PairsOnDisk(self._table, self._rows[place])
        return pair_of_row(self._table.slice(int(self._rows[place]), 1).to_pylist()[0])

    def __iter__(self) -> Iterator[PreferencePair]:
        """In order, some hundred at a time."""
        for batch in self._batches():
            yield from map(pair_of_row, batch.to_pylist())

    def take(self, places: IntArray) -> "PairsOnDisk":
        """The pairs at these places, which count from 0."""
        return PairsOnDisk(self._table, self._rows[places])

    def write_parquet(self, path: Path) -> None:
        """Write the rows as they are: the file that `rmcore.data.table.write_pairs` writes of these pairs."""
        write_tables(self._batches(), path)

    def _batches(self) -> Iterator[pa.Table]:
        """The rows, some hundred a table; what lies far apart in the file is copied from where it lies, bit by bit."""
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
class PairWriter:
    """Collects pairs in a file: `extend` it inside a `with` block, then `pairs` reads them.

    Raises:
        DataError: a text is not valid Unicode (a lone surrogate).
    """

    path: Path
    num_pairs: int = 0

    def __enter__(self) -> "PairWriter":
        self._waiting: list[dict[str, Any]] = []
        self._writer = pa.ipc.new_file(str(self.path), SCHEMA)
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
        return self.num_pairs

    def extend(self, pairs: Iterable[PreferencePair]) -> None:
        """Add pairs at the end."""
        for pair in pairs:
            self._waiting.append(row_of_pair(pair))
            self.num_pairs += 1
            if len(self._waiting) == ROWS_A_BATCH:
                self._write()

    def pairs(self) -> PairsOnDisk:
        """All of them, once the block has ended."""
        table = pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()
        return PairsOnDisk(table, np.arange(table.num_rows, dtype=np.int64))

    def _write(self) -> None:
        rows, self._waiting = self._waiting, []
        try:
            self._writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        except UnicodeEncodeError as error:
            raise not_unicode(error) from error


@dataclass(frozen=True, slots=True)
class PairFile:
    """The pairs of a file that `rmcore.data.table.write_pairs` wrote, read anew each time they are gone through.

    Raises:
        DataError: the file is missing, damaged, or not such a table; when it is read.
    """

    path: Path

    def __len__(self) -> int:
        return count_pairs(self.path)

    def __iter__(self) -> Iterator[PreferencePair]:
        return iter_pairs(self.path)


def select(pairs: Sequence[PreferencePair], places: IntArray) -> Sequence[PreferencePair]:
    """The pairs at these places, in that order: a list of a list's, and on disk those of pairs on disk."""
    if isinstance(pairs, PairsOnDisk):
        return pairs.take(places)
    return [pairs[place] for place in places.tolist()]
