"""Files of preference data as a stream of raw records: Parquet, JSON, JSON Lines, CSV and TSV, each also gzipped.

Memory stays bounded by one batch (Parquet) or one row (the text formats), whatever the size of the file. What is wrong
with one row becomes that row's `problem` and reading continues; what is wrong with the file (missing, empty, cut off,
corrupted) is a `DataError`, because rows after the damage would be lost without a word.

Text is decoded with `surrogateescape`: bytes that are not UTF-8 become lone surrogates, which
`rmcore.data.readers.layouts` finds in the text that holds them. So one bad byte costs one row and not the file.
"""

import codecs
import csv
import gzip
import io
import re
import shlex
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from rmcore.core.errors import DataError
from rmcore.data.readers.columns import LIST_COLUMNS, spelling
from rmcore.data.readers.fields import Reason
from rmcore.data.readers.json_stream import JsonText, RepeatedKey, RepeatedKeyError, array_values, parse_json

BATCH_ROWS = 512
MAX_ROW_BYTES = 64 * 2**20
"""Largest single row of a text format. A longer one is a file of another kind, and would have to fit into memory."""
_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LIST_SPELLINGS = frozenset(map(spelling, LIST_COLUMNS))
_COPY_BYTES = 2**20
_MESSAGE_LIST = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]""")


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One row as it lies in the source: `fields` where it could be read, else `problem` says why not.

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
    with _damage_is_a_data_error(path), path.open("rb") as raw:
        binary = gzip.GzipFile(fileobj=raw) if compressed else raw
        yield from _READERS[kind](binary, path)


def file_kind(path: Path) -> tuple[str, bool]:
    """(extension, whether gzipped) of a readable file.

    Raises:
        DataError: the extension is not one that is read.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes[-1:] == [".gz"]
    kind = "".join(suffixes[:-1][-1:] if compressed else suffixes[-1:])
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
    """Whether a source is a file of text that lies here."""
    path = Path(source).expanduser()
    return path.is_file() and file_kind(path)[0] in _TEXT_KINDS


def is_utf8(path: Path) -> bool:
    """Whether all bytes of a text file are UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _damage_is_a_data_error(path), gzip.open(path) if file_kind(path)[1] else path.open("rb") as file:
        try:
            while chunk := file.read(_COPY_BYTES):
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def conversion_to_utf8(path: Path, encoding: str = "CP1252") -> str:
    """Say how to convert a text file of another encoding: a command to paste, and what to look at afterwards."""
    name = path.name.removesuffix(".gz")
    target = shlex.quote(str(path.with_name(f"{Path(name).stem}.utf8{Path(name).suffix}")))
    source = shlex.quote(str(path))
    command = f"gzip -dc {source} | iconv -f" if name != path.name else "iconv -f"
    command += f" {encoding} -t UTF-8 {'' if name != path.name else source + ' '}> {target}"
    if encoding != "CP1252":
        return f"Convert it:\n    {command}"
    return (
        "Files of Excel and other Windows programs are most often Windows-1252. Such a file is converted by\n"
        f"    {command}\n"
        "Look at accents and quotation marks in the result; where they are wrong, name the true encoding after -f."
    )


def arrow_records(batch: pa.RecordBatch | pa.Table, first_row: int) -> Iterator[RawRecord]:
    """The rows of an Arrow batch; a row with invalid text or an unrepresentable value is set aside alone."""
    try:
        for offset, fields in enumerate(batch.to_pylist()):
            yield RawRecord(first_row + offset, fields)
    except (ValueError, OverflowError):  # UnicodeDecodeError is a ValueError; to_pylist fails before the first yield
        for offset in range(batch.num_rows):
            yield _arrow_record(batch.slice(offset, 1), first_row + offset)


def _arrow_record(row_batch: pa.RecordBatch | pa.Table, row: int) -> RawRecord:
    try:
        return RawRecord(row, row_batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        return RawRecord(row, None, Reason.INVALID_UTF8, str(error))
    except (ValueError, OverflowError) as error:
        return RawRecord(row, None, Reason.WRONG_TYPE, str(error))


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
def _damage_is_a_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise DataError(
            f"{path} ends before its compressed data does: it was cut off, and the rows behind the cut are lost. "
            "Fetch or write the file again."
        ) from error
    except (zlib.error, gzip.BadGzipFile, pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): it is damaged, or the disk is. Fetch or write it again."
        ) from error


def _text(binary: BinaryIO, newline: str | None = None) -> TextIO:
    return io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _read_parquet(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    with ExitStack() as stack:
        if isinstance(binary, gzip.GzipFile):  # Parquet is read from its end: unpack to disk, not into memory
            unpacked = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(binary, unpacked, _COPY_BYTES)
            unpacked.seek(0)
            binary = unpacked
        # Buffered and not pre-read: otherwise a whole row group, in practice often the whole file, sits in memory.
        file = pq.ParquetFile(binary, buffer_size=_COPY_BYTES, pre_buffer=False)
        _check_columns(file.schema_arrow.names, path)
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
            yield RawRecord(row, None, Reason.INVALID_UTF8, _excerpt(line.decode("utf-8", "backslashreplace")))
            continue
        try:
            yield _json_record(row, parse_json(text))
        except RepeatedKeyError as error:
            yield _json_record(row, RepeatedKey(str(error)))
        except (ValueError, RecursionError):  # ValueError also for numbers of more digits than Python converts
            yield RawRecord(row, None, Reason.NOT_JSON, _excerpt(text))


def _json_record(row: int, value: Any) -> RawRecord:
    if isinstance(value, dict):
        return RawRecord(row, value)
    if isinstance(value, RepeatedKey):
        return RawRecord(row, None, Reason.REPEATED_KEY, f"the key {value.key!r}")
    return RawRecord(row, None, Reason.WRONG_TYPE, _excerpt(repr(value)))


def _read_json(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    """An array of objects, or objects one after the other (JSON Lines, also pretty-printed)."""
    text = JsonText(_text(binary))
    row = 0
    try:
        if text.peek() == "{":
            while text.peek():
                row += 1
                yield _json_record(row, text.value())
        elif text.peek():
            for row, value in enumerate(array_values(text), start=1):
                yield _json_record(row, value)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} is not valid JSON after {row} rows ({error}): it was cut off or is damaged. Write it again; "
            "if it holds one object a line, name it .jsonl, and a bad line is set aside alone."
        ) from error


def _read_csv(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    csv.field_size_limit(MAX_ROW_BYTES)  # process-wide in Python; the default of 128 KiB refuses long completions
    text = _text(binary, newline="")
    first: list[str] = []  # as far as the header
    while (not first or not first[-1].strip()) and (line := text.readline()):
        first.append(line)
    delimiter = "\t" if file_kind(path)[0] == ".tsv" else _delimiter("".join(first[-1:]))
    rows = csv.reader(chain(first, text), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    row = 0
    while True:
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if header is None or "unexpected end of data" in str(error):
                raise DataError(
                    f"{path} is not valid CSV near line {rows.line_num} ({error}): a quoted cell is not closed or the "
                    "file was cut off, so what follows cannot be told apart. Correct the quotes or write it again."
                ) from error
            row += 1
            yield RawRecord(row, None, Reason.NOT_CSV, f"near line {rows.line_num}: {error}")
            continue
        if not cells:
            continue
        if header is None:
            header = _csv_header(cells, path)
            continue
        row += 1
        yield _csv_record(row, header, cells)


def _delimiter(header: str) -> str:
    """A comma, unless the header has none and has semicolons, or tabs: a file of one column holds no pairs."""
    unquoted = re.sub(r'"[^"]*"', "", header)
    others = [delimiter for delimiter in ";\t" if delimiter in unquoted]
    return others[0] if len(others) == 1 and "," not in unquoted else ","


def _csv_header(cells: list[str], path: Path) -> list[str]:
    header = [cell.strip() for cell in cells]
    if any("\udc80" <= char <= "\udcff" for char in "".join(header)):
        raise DataError(f"{path} is not UTF-8, its header holds other bytes. {conversion_to_utf8(path)}")
    _check_columns(header, path)
    return header


def _check_columns(names: list[str], path: Path) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{path} has the column {repeated[0]!r} twice: which one is meant is unknown. Rename one.")


def _csv_record(row: int, header: list[str], cells: list[str]) -> RawRecord:
    if len(cells) != len(header):
        return RawRecord(row, None, Reason.NOT_CSV, f"{len(cells)} cells for {len(header)} columns: {cells[0][:80]}")
    try:
        return RawRecord(row, {name: _csv_cell(name, cell) for name, cell in zip(header, cells, strict=True)})
    except (ValueError, RecursionError) as error:
        reason = Reason.REPEATED_KEY if isinstance(error, RepeatedKeyError) else Reason.NOT_JSON
        return RawRecord(row, None, reason, _excerpt(",".join(cells)))


def _csv_cell(name: str, cell: str) -> Any:
    """CSV has only text: message lists, and the lists of ranked answers, are written in it as JSON.

    Other text stays text even where it would parse: an answer may well be `[1, 2]`. A message list that is not JSON
    (Python's own notation, say) is refused, as it would otherwise be taken for an answer.
    """
    is_list = spelling(name) in _LIST_SPELLINGS and cell.lstrip().startswith("[")
    return parse_json(cell) if is_list or _MESSAGE_LIST.match(cell) else cell


def _excerpt(text: str) -> str:
    return text.strip()[:200]


_READERS: dict[str, Callable[[Any, Path], Iterator[RawRecord]]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
_TEXT_KINDS = frozenset(_READERS) - {".parquet"}
