"""Files of preference data as a stream of raw records: Parquet, Arrow, JSON, JSON Lines, CSV, TSV and Excel.

Memory stays bounded by one batch (Parquet, Arrow) or one row (the text formats), whatever the size of the file. What is
wrong with one row becomes that row's `problem` and reading continues; what is wrong with the file (missing, empty, cut
off, corrupted) is a `DataError`, because rows after the damage would be lost without a word.

Text is decoded with `surrogateescape`: bytes that are not UTF-8 become lone surrogates, which
`rmcore.data.readers.layouts` finds in the text that holds them. So one bad byte costs one row and not the file.
"""

import codecs
import errno
import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from rmcore.core.errors import DataError
from rmcore.data.readers.fields import Reason
from rmcore.data.readers.json_stream import RepeatedKeyError, json_values, parse_json
from rmcore.data.readers.records import RawRecord, arrow_records, excerpt, record_of
from rmcore.data.readers.tables import MAX_ROW_BYTES, column_names, conversion_to_utf8, csv_records, excel_records
from rmcore.data.readers.unpacking import ROW_BYTES, Growth, Unpacked, rows_a_batch

BATCH_ROWS = 512
_GZIP_MAGIC = b"\x1f\x8b"
_ARROW_FILE = b"ARROW1"
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_COPY_BYTES = 2**20
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


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
    if kind not in _READERS:
        raise DataError(
            f"{path} has the extension {kind or '(none)'!r}, so its format is unknown. "
            f"Readable are {', '.join(_READERS)}, each also with .gz behind it: convert or rename the file."
        )
    return kind, compressed


def is_file_name(name: str) -> bool:
    """Whether `name` ends like a file that can be read here."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    return any(suffix in _READERS for suffix in suffixes[-2:])


def is_text_file(source: str) -> bool:
    """Whether a source is a file of text that is here."""
    path = Path(source).expanduser()
    return path.is_file() and file_kind(path)[0] in _TEXT_KINDS


def is_utf8(path: Path) -> bool:
    """Whether all bytes of a text file are UTF-8."""
    try:
        for _ in codecs.iterdecode(_chunks(path), "utf-8"):
            pass
    except UnicodeDecodeError:
        return False
    return True


def _chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a text file, unpacked."""
    with _opened(path) as file:
        while chunk := file.read(_COPY_BYTES):
            yield chunk


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
    """The bytes of a file, unpacked as they are read."""
    with _damage_is_a_data_error(path), path.open("rb") as raw:
        yield io.BufferedReader(Unpacked(raw, path)) if file_kind(path)[1] else raw


@contextmanager
def _damage_is_a_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise DataError(
            f"{path} ends before its data does: it was cut off, and the rows behind the cut are lost. "
            "Fetch or write the file again."
        ) from error
    except (zlib.error, gzip.BadGzipFile, pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) in _NO_ROOM:
            raise DataError(
                f"{path} does not fit into {tempfile.gettempdir()}, where it is unpacked ({error}): free space there, "
                "set TMPDIR to another folder, or unpack the file yourself."
            ) from error
        raise DataError(
            f"{path} cannot be read ({error}): it is damaged, or the disk is. Fetch or write it again."
        ) from error


def _text(binary: BinaryIO, newline: str | None = None) -> TextIO:
    return io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


@contextmanager
def _seekable(binary: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """A binary file that is read from its end, or in any order: unpacked to disk where it is gzipped, not to memory."""
    if not file_kind(path)[1]:
        yield binary
        return
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(binary, unpacked, _COPY_BYTES)
        unpacked.seek(0)
        yield unpacked


def _read_parquet(packed: BinaryIO, path: Path) -> Iterator[RawRecord]:
    with _seekable(packed, path) as binary:
        # Buffered and not pre-read: otherwise a whole row group, in practice often the whole file, sits in memory.
        file = pq.ParquetFile(binary, buffer_size=_COPY_BYTES, pre_buffer=False, page_checksum_verification=True)
        column_names(file.schema_arrow.names, path)
        size = sum(file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
        Growth(path).add(size + ROW_BYTES * file.metadata.num_rows)
        row, growth = 1, Growth(path)
        for batch in file.iter_batches(batch_size=rows_a_batch(file, binary, BATCH_ROWS), use_threads=False):
            growth.add(batch.nbytes)
            yield from arrow_records(batch, row)
            row += batch.num_rows


def _read_arrow(packed: BinaryIO, path: Path) -> Iterator[RawRecord]:
    """Batches of Arrow, as a stream (what `datasets` keeps) or as a file (Feather)."""
    with _seekable(packed, path) as binary, ExitStack() as stack:
        is_file = binary.read(len(_ARROW_FILE)) == _ARROW_FILE
        if not is_file:  # a stream that was cut between two batches reads like a whole one, but for its last bytes
            binary.seek(-len(_ARROW_END), io.SEEK_END)
            if binary.read() != _ARROW_END:
                raise DataError(
                    f"{path} has neither the beginning of an Arrow file nor the end of an Arrow stream: it was cut "
                    "off, or is another format (Feather 1). Write it again, as Parquet or with pyarrow.ipc."
                )
        binary.seek(0)
        try:
            opened = stack.enter_context(pa.ipc.open_file(binary) if is_file else pa.ipc.open_stream(binary))
            names, kinds = opened.schema.names, str(opened.schema)
        except UnicodeDecodeError as error:
            raise pa.ArrowInvalid(f"its schema is no text: {error}") from error
        column_names(names, path)
        if "dictionary<" in kinds:
            raise DataError(
                f"{path} holds a column of categories (Arrow's dictionary type), which may unpack to any size: write "
                "it as text, or the table as Parquet."
            )
        row, growth = 1, Growth(path)
        for batch in _arrow_batches(opened, path, is_file=is_file):
            growth.add(batch.nbytes)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from arrow_records(batch.slice(start, BATCH_ROWS), row + start)
            row += batch.num_rows
        if not is_file and binary.read(1):
            raise DataError(f"{path} holds a second table behind the first: write them to files of their own.")


def _arrow_batches(opened: Any, path: Path, *, is_file: bool) -> Iterator[pa.RecordBatch]:
    """Batches whose offsets are right: pyarrow takes them as they are, and reads beyond its memory by wrong ones."""
    try:
        for batch in map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened:
            batch.validate(full=True)
            yield batch
    except (MemoryError, SystemError) as error:
        raise DataError(
            f"{path} names a batch of rows that cannot be laid out in memory ({error or type(error).__name__}): it is "
            "damaged, or this machine has too little for it. Write it again, in smaller batches."
        ) from error


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
        for row, value in enumerate(json_values(_text(binary)), start=1):
            yield _json_record(row, value)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} is not valid JSON after {row} rows ({error}): it was cut off or is damaged. Write it again; "
            "if it holds one object a line, name it .jsonl, and a bad line is set aside alone."
        ) from error


def _read_csv(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    delimiter = "\t" if file_kind(path)[0] == ".tsv" else None
    return csv_records(_text(binary, newline=""), path, delimiter, partial(_chunks, path))


def _read_xlsx(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    with _seekable(binary, path) as unpacked:
        yield from excel_records(unpacked, path)


_READERS: dict[str, Callable[[Any, Path], Iterator[RawRecord]]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".arrow": _read_arrow,
    ".xlsx": _read_xlsx,
}
_TEXT_KINDS = frozenset(_READERS) - {".parquet", ".arrow", ".xlsx"}
