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
import shlex
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from rmcore.core.errors import DataError
from rmcore.data.readers.arrow_values import Plain, plain_columns
from rmcore.data.readers.columns import spelling
from rmcore.data.readers.csv_rows import MAX_ROW_BYTES, csv_rows, refuse_blank_lines
from rmcore.data.readers.excel_rows import ErrorCell, excel_rows, is_cut
from rmcore.data.readers.fields import WORDS_FOR_NOTHING, Reason, RowRejected, text_value
from rmcore.data.readers.json_stream import RepeatedKeyError, json_values, parse_json
from rmcore.data.readers.structure import structured
from rmcore.data.readers.unpacking import ROW_BYTES, Growth, Unpacked, rows_a_batch

BATCH_ROWS = 512
_GZIP_MAGIC = b"\x1f\x8b"
_ARROW_FILE = b"ARROW1"
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_COPY_BYTES = 2**20
_SURVEY_ID = '{"ImportId":'
_LONGEST_NAME = 64
"""Characters of a cell that may be the name of a column, or a word for nothing."""
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One row as it is in the source: `fields` where it could be read, else `problem` says why not.

    `row` counts from 1: the line of a JSON Lines file, the record of the other formats.
    """

    row: int
    fields: dict[str, Any] | None = None
    problem: Reason | None = None
    excerpt: str = ""


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


def conversion_to_utf8(path: Path, encoding: str = "CP1252") -> str:
    """Say how to convert a text file of another encoding: a command to paste, and what to look at afterwards."""
    name = Path(path.name.removesuffix(".gz"))
    source, target = (shlex.quote(str(one)) for one in (path, path.with_name(f"{name.stem}.utf8{name.suffix}")))
    unpack, read = (f"gzip -dc {source} | ", "") if path.name.endswith(".gz") else ("", f"{source} ")
    command = f"{unpack}iconv -f {encoding} -t UTF-8 {read}> {target}"
    if encoding != "CP1252":
        return f"Convert it:\n    {command}"
    return (
        "Files of Excel and other Windows programs are most often Windows-1252. Such a file is converted by\n"
        f"    {command}\n"
        "Look at accents and quotation marks in the result; where they are wrong, name the true encoding after -f."
    )


def record_of(row: int, fields: Mapping[str, Any], plain: Mapping[str, Plain] | None = None) -> RawRecord:
    """The record of a row whose values could be read, in whatever format; see `structure` and `plain_columns`."""
    try:
        if not "".join(fields).isascii():
            for name in fields:
                text_value(name, None)
        if plain:
            fields = {name: plain[name](value) if name in plain else value for name, value in fields.items()}
        return RawRecord(row, {name: structured(name, value) for name, value in fields.items()})
    except RowRejected as rejection:
        return RawRecord(row, None, rejection.reason, _excerpt(repr(fields)))
    except RepeatedKeyError as error:
        return RawRecord(row, None, Reason.REPEATED_KEY, f"the key {error}")


def arrow_records(batch: pa.RecordBatch | pa.Table, first_row: int) -> Iterator[RawRecord]:
    """The rows of an Arrow batch; a row with invalid text or an unrepresentable value is set aside alone."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
        if batch.num_rows == 1:
            reason = Reason.INVALID_UTF8 if isinstance(error, UnicodeDecodeError) else Reason.WRONG_TYPE
            yield RawRecord(first_row, None, reason, str(error))
            return
        for offset in range(batch.num_rows):
            yield from arrow_records(batch.slice(offset, 1), first_row + offset)
        return
    plain = plain_columns(batch.schema)
    for row, fields in enumerate(rows, start=first_row):
        yield record_of(row, fields, plain)


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
        _check_columns(file.schema_arrow.names, path)
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
        _check_columns(names, path)
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
    row = num_blank = 0
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
            num_blank += 1
            refuse_blank_lines(path, num_blank)
            continue
        num_blank = 0
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            yield RawRecord(row, None, Reason.INVALID_UTF8, _excerpt(line.decode("utf-8", "backslashreplace")))
            continue
        try:
            yield _json_record(row, parse_json(text))
        except RepeatedKeyError as error:
            yield _json_record(row, error)
        except (ValueError, RecursionError):  # ValueError also for numbers of more digits than Python converts
            yield RawRecord(row, None, Reason.NOT_JSON, _excerpt(text))


def _json_record(row: int, value: Any) -> RawRecord:
    if isinstance(value, dict):
        return record_of(row, value)
    if isinstance(value, RepeatedKeyError):
        return RawRecord(row, None, Reason.REPEATED_KEY, f"the key {str(value)!r}")
    return RawRecord(row, None, Reason.WRONG_TYPE, _excerpt(repr(value)))


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
    rows = csv_rows(_text(binary, newline=""), path, delimiter, partial(_chunks, path))
    yield from _table(rows, path, _wrong_line)


def _read_xlsx(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    with _seekable(binary, path) as unpacked:
        yield from _table(excel_rows(unpacked, path), path, _wrong_cells, first=2)


Wrong = tuple[Reason, str] | None
"""The reason for which a row of a table is wrong, and the place in it."""


def _wrong_line(header: Sequence[str], cells: Sequence[Any]) -> Wrong:
    if len(cells) >= len(header) and not any(cell.strip() for cell in cells[len(header) :]):
        return None
    return Reason.NOT_CSV, f"{len(cells)} cells for {len(header)} columns: {cells[0][:80]}"


def _wrong_cells(header: Sequence[str], cells: Sequence[Any]) -> Wrong:
    for name, cell in zip(header, cells, strict=False):
        if isinstance(cell, ErrorCell) or is_cut(cell):
            return Reason.EXCEL_ERROR if isinstance(cell, ErrorCell) else Reason.CUT_CELL, f"{name}: {cell[:80]}"
    is_beyond = any(cell is not None for cell in cells[len(header) :])
    return (Reason.NOT_A_TABLE, f"a cell to the right of {len(header)} columns") if is_beyond else None


def _table(
    rows: Iterator[Sequence[Any]], path: Path, wrong: Callable[[Sequence[str], Sequence[Any]], Wrong], first: int = 1
) -> Iterator[RawRecord]:
    """The rows of a table below its header, from number `first` on; a cell that is a word for nothing is empty.

    Files that were joined have the header of the second one as a row, and its order of columns holds from there on. A
    survey tool (Qualtrics) writes the questions and its own ids below the header: two more lines of it, and no rows.

    Raises:
        DataError: a column is there twice, the header holds bytes that are not UTF-8, or a row is a header with other
            columns.
    """
    header = _header(next(rows, ()), path)
    names = {spelling(name): name for name in header}
    head = list(islice(rows, 2))
    is_survey = len(head) == 2 and _is_of_survey(head[1])
    for row, cells in enumerate(rows if is_survey else chain(head, rows), start=first + 2 * is_survey):
        found = {spelling(cell) for cell in cells if isinstance(cell, str) and len(cell) <= _LONGEST_NAME}
        num_names = sum(len(name) > 1 for name in found & names.keys())
        if len(found & names.keys()) > 1 and found | {""} == names.keys() | {""}:
            again = _header(cells, path)
            header = again if {*again} == {*header} else [names[spelling(name)] for name in again]
            yield RawRecord(row, None, Reason.HEADER_AGAIN, ", ".join(header))
        elif len(found & names.keys()) > 1 and 2 * num_names > sum(cell not in (None, "") for cell in cells):
            raise DataError(
                f"{path}: row {row} is a header again, with other columns than the first ({', '.join(map(str, cells))})"
                ": two files were joined. Write each to a file of its own."
            )
        elif problem := wrong(header, cells):
            yield RawRecord(row, None, *problem)
        elif any(cell is not None for cell in cells):
            named = zip(header, chain(cells, repeat(None)), strict=False)
            yield record_of(row, {name: None if _is_nothing(cell) else cell for name, cell in named})


def _is_nothing(cell: Any) -> bool:
    return isinstance(cell, str) and len(cell) <= _LONGEST_NAME and cell.strip() in WORDS_FOR_NOTHING


def _is_of_survey(cells: Sequence[Any]) -> bool:
    filled = [cell for cell in cells if cell]
    return bool(filled) and all(isinstance(cell, str) and cell.startswith(_SURVEY_ID) for cell in filled)


def _header(cells: Sequence[Any], path: Path) -> list[str]:
    """The names of the columns, without those of the empty columns that spreadsheets write behind the last one."""
    header = ["" if cell is None else str(cell).strip() for cell in cells]
    while header and not header[-1]:
        header.pop()
    if any("\udc80" <= char <= "\udcff" for char in "".join(header)):
        raise DataError(f"{path} is not UTF-8, its header holds other bytes. {conversion_to_utf8(path)}")
    _check_columns(header, path)
    return header


def _check_columns(names: list[str], path: Path) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{path} has the column {repeated[0]!r} twice: which one is meant is unknown. Rename one.")


def _excerpt(text: str) -> str:
    return text.strip()[:200]


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
