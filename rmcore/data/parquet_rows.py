"""Records of one kind as rows of a Parquet file and back: batch by batch, so that they may be more than memory holds.

What kind it is says a `RecordSchema`: `PAIRS` and `OBSERVATIONS` of `rmcore.data.table`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rmcore.core.errors import DataError
from rmcore.core.files import atomic_file

Record = TypeVar("Record")
ROWS_A_BATCH = 512
"""Records that are read, or written to an Arrow file, at a time."""
ROWS_A_GROUP, BYTES_A_GROUP = 8192, 2**24
"""Bounds of a row group of Parquet, both approximate."""


@dataclass(frozen=True, slots=True)
class RecordSchema(Generic[Record]):
    """How records of one kind lie in a table.

    Attributes:
        name: of several records, in messages: pairs.
        columns: names and types.
        to_row: a record as a row of the schema.
        from_row: a row of the schema as the record that it was.
    """

    name: str
    columns: pa.Schema
    to_row: Callable[[Record], dict[str, Any]]
    from_row: Callable[[Mapping[str, Any]], Record]


def write_records(schema: RecordSchema[Record], records: Iterable[Record], path: Path) -> None:
    """Write records, batch by batch, so that they may be a stream. The file appears whole or not at all.

    Raises:
        DataError: a text is not valid Unicode (a lone surrogate).
    """
    rows = map(schema.to_row, records)
    batches = iter(lambda: list(islice(rows, ROWS_A_BATCH)), [])
    try:
        write_tables(schema, (pa.Table.from_pylist(batch, schema=schema.columns) for batch in batches), path)
    except UnicodeEncodeError as error:
        raise not_unicode(schema, error) from error


def write_tables(schema: RecordSchema[Record], tables: Iterable[pa.Table], path: Path) -> None:
    """Write tables of a schema to Parquet, whole or not at all, in row groups that are bounded by rows and by bytes.

    A file's footer has an entry for each group, and writer and reader hold it in memory. Least and greatest values are
    left out of it: of texts they are whole texts.
    """
    with (
        atomic_file(path) as unfinished,
        unfinished.open("wb") as file,  # pyarrow itself opens no file whose name is not UTF-8
        pq.ParquetWriter(file, schema.columns, compression="zstd", write_statistics=False) as writer,
    ):
        waiting: list[pa.Table] = []
        for table in tables:
            waiting.append(table)
            if sum(map(len, waiting)) >= ROWS_A_GROUP or sum(one.nbytes for one in waiting) >= BYTES_A_GROUP:
                writer.write_table(pa.concat_tables(waiting))
                waiting.clear()
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


def not_unicode(schema: RecordSchema[Record], error: UnicodeEncodeError) -> DataError:
    """Say that a text cannot be encoded."""
    one = schema.name.removesuffix("s")
    return DataError(
        f"one of the {schema.name} holds text that is not valid Unicode ({error}): it cannot be stored or tokenized. "
        f"Drop that {one}; rmcore.data.readers.sources.load_pairs sets such rows aside."
    )


@dataclass(frozen=True, slots=True)
class RecordFile(Generic[Record]):
    """The records of a file that `write_records` wrote, read again at each iteration; memory holds some hundred.

    Raises:
        DataError: the file is missing, damaged, or not such a table; when it is read or counted.
    """

    schema: RecordSchema[Record]
    path: Path

    def __len__(self) -> int:
        with _damage_in_words(self.schema, self.path), self.path.open("rb") as file:
            return int(pq.read_metadata(file).num_rows)

    def __iter__(self) -> Iterator[Record]:
        schema, path = self.schema, self.path
        with _damage_in_words(schema, path), path.open("rb") as opened, pq.ParquetFile(opened) as file:
            absent = [name for name in schema.columns.names if name not in file.schema_arrow.names]
            if absent:
                raise DataError(
                    f"{path} has no column {absent[0]!r}: it is not a table of prepared {schema.name}. "
                    "Read other data with rmcore.data.readers.sources.load_pairs."
                )
            for batch in file.iter_batches(ROWS_A_BATCH):
                yield from map(schema.from_row, batch.to_pylist())


@contextmanager
def _damage_in_words(schema: RecordSchema[Record], path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is not there: the {schema.name} were not prepared. Run the prepare stage again."
        ) from error
    except (OSError, pa.ArrowException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): it is damaged. Run the prepare stage again.") from error
