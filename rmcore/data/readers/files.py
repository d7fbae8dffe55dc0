"""Files of preference data as a stream of raw records: Parquet, JSON, JSON Lines, CSV and TSV.

Memory stays bounded by one batch (Parquet) or one row (JSON Lines, CSV), whatever the size of the file; `.json` is read
as a whole. What is wrong with one row becomes that row's `problem` and reading continues; what is wrong with the file
(missing, empty, cut off, corrupted) is a `DataError`, because rows after the damage would be lost without a word.

Text is decoded with `surrogateescape`: bytes that are not UTF-8 become lone surrogates, which
`rmcore.data.readers.layouts` finds in the text that holds them. So one bad byte costs one row and not the file.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rmcore.core.errors import DataError
from rmcore.data.readers.fields import Reason
from rmcore.data.readers.json_values import RepeatedKeyError, json_values, parse_json
from rmcore.data.readers.records import RawRecord, arrow_records, excerpt, record_of
from rmcore.data.readers.tables import MAX_ROW_BYTES, column_names, conversion_to_utf8, csv_records

BATCH_ROWS = 512
_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_READ_BYTES = 2**20
_INSTEAD = {
    ".xlsx": "Save the sheet as CSV UTF-8 in the program that wrote it.",
    ".arrow": "Name the folder that save_to_disk wrote, or write the table as Parquet.",
}
"""Advice on common files that are not read."""


def read_file(path: Path) -> Iterator[RawRecord]:
    """The rows of one file, in order, told by its extension.

    Raises:
        DataError: the file is missing, empty, cut off, corrupted or of a kind that is not read.
    """
    if not path.is_file():
        raise DataError(f"{path} is not a file: there is nothing to read. Check the path (relative to {Path.cwd()}).")
    kind, compressed = file_kind(path)
    _check_start(path, compressed)
    with _opened(path) as binary:
        yield from _READERS[kind](binary, path)


def file_kind(path: Path) -> tuple[str, bool]:
    """(extension, whether gzipped) of a readable file.

    Raises:
        DataError: the extension is not one that is read.
    """
    name = path.name.lower()
    compressed = name.endswith(".gz")
    kind = Path(name.removesuffix(".gz")).suffix
    if kind not in (_TEXT_KINDS if compressed else _READERS):
        raise DataError(
            f"{path} has the extension {kind or '(none)'!r}{', gzipped' * compressed}, which is not read. Readable are "
            f"{', '.join(_READERS)}, those of text also with .gz behind it. "
            + _INSTEAD.get(kind, "Convert or rename the file.")
        )
    return kind, compressed


def is_file_name(name: str) -> bool:
    """Whether `name` ends like a file of data, read here or refused with advice: none is left out or is a hub name."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    return any(suffix in _READERS or suffix in _INSTEAD for suffix in suffixes[-2:])


def is_text_file(source: str) -> bool:
    """Whether a source is a file of text that is here."""
    path = Path(source).expanduser()
    return path.is_file() and file_kind(path)[0] in _TEXT_KINDS


def is_utf8(path: Path) -> bool:
    """Whether all bytes of a text file are UTF-8."""
    try:
        with _opened(path) as file:
            for _ in codecs.iterdecode(iter(lambda: file.read(_READ_BYTES), b""), "utf-8"):
                pass
    except UnicodeDecodeError:
        return False
    return True


def _check_start(path: Path, compressed: bool) -> None:
    try:
        with path.open("rb") as raw:
            magic = raw.read(2)
    except OSError as error:
        raise DataError(f"{path} cannot be opened ({error}). Check the file's permissions.") from error
    if not magic:
        raise DataError(f"{path} is empty (0 bytes): it was never written or its download failed. Fetch it again.")
    if compressed and magic != _GZIP_MAGIC:
        raise DataError(f"{path} is named .gz but is not gzip data. Take .gz off its name, or fetch it again.")
    if magic in _UTF16_MARKS and file_kind(path)[0] in _TEXT_KINDS:
        raise DataError(f"{path} is UTF-16 and not UTF-8. {conversion_to_utf8(path, 'UTF-16')}")
    if not compressed and magic == _GZIP_MAGIC:
        raise DataError(f"{path} is gzip-compressed, its name does not say so. Rename it to {path.name}.gz.")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked as they are read.

    Raises:
        DataError: reading it fails; the sentence says how.
    """
    try:
        with cast(BinaryIO, gzip.open(path) if file_kind(path)[1] else path.open("rb")) as binary:
            yield binary
    except EOFError as error:
        raise DataError(
            f"{path} ends before its data does: it was cut off, and the rows behind the cut are lost. "
            "Fetch or write the file again."
        ) from error
    except (zlib.error, gzip.BadGzipFile, pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): it is damaged, or the disk is. Fetch or write it again."
        ) from error


def _text(binary: BinaryIO, newline: str | None = None) -> TextIO:
    return io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _read_parquet(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    # Buffered and not pre-read: otherwise a whole row group, in practice often the whole file, sits in memory.
    file = pq.ParquetFile(binary, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True)
    column_names(file.schema_arrow.names, path)
    row = 1
    for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
        yield from arrow_records(batch, row)
        row += batch.num_rows


def _read_jsonl(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    row = 0
    while line := binary.readline(MAX_ROW_BYTES + 1):
        row += 1
        if len(line) > MAX_ROW_BYTES:
            raise DataError(
                f"{path} line {row} is longer than {MAX_ROW_BYTES // 2**20} MiB: this is not one JSON object a line. "
                "If it is one JSON array, name it .json."
            )
        if row == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            yield RawRecord(row, None, Reason.INVALID_UTF8, excerpt(line.decode("utf-8", "backslashreplace")))
            continue
        try:
            yield _json_record(row, parse_json(text))
        except RepeatedKeyError as error:
            yield _json_record(row, error)
        except (ValueError, RecursionError):  # ValueError also for numbers of more digits than Python converts
            yield RawRecord(row, None, Reason.NOT_JSON, excerpt(text))


def _json_record(row: int, value: Any) -> RawRecord:
    if isinstance(value, dict):
        return record_of(row, value)
    if isinstance(value, RepeatedKeyError):
        return RawRecord(row, None, Reason.REPEATED_KEY, f"the key {str(value)!r}")
    return RawRecord(row, None, Reason.WRONG_TYPE, excerpt(repr(value)))


def _read_json(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    """An array of objects, or objects one after the other (JSON Lines, also pretty-printed)."""
    row = 0
    try:
        for row, value in enumerate(json_values(_text(binary).read()), start=1):
            yield _json_record(row, value)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} is not valid JSON after {row} rows ({error}): it was cut off or is damaged. Write it again; "
            "if it holds one object a line, name it .jsonl, and a bad line is set aside alone."
        ) from error


def _read_csv(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    return csv_records(_text(binary, newline=""), path, "\t" if file_kind(path)[0] == ".tsv" else None)


_READERS: dict[str, Callable[[Any, Path], Iterator[RawRecord]]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
_TEXT_KINDS = frozenset(_READERS) - {".parquet"}
