r"""Tables that programs write, CSV, TSV and Excel, as records; no cell is read as another one.

Where a record of CSV begins is known only if the record before it was read correctly: after a misplaced quote, the next
line may be the inside of a cell, and its commas would make pairs of an answer's sentences. So the first record whose
extent is uncertain ends the reading with an error that names its line:

- the text breaks the rules of quoting (RFC 4180), or ends inside a quoted cell. Quotes may be inside a cell that is not
  quoted if their number is even;
- a quote follows a backslash and no quote of the file is doubled. `"a \", b"` is then one cell of a writer that escapes
  quotes with backslashes (Spark, MySQL), and two cells of one that doubles them;
- the record contains NUL, which a text file has only where a part of it was never written.

Excel cuts what is longer than a cell may be without a word, so a text of exactly that length is not trusted. Formulas
give what Excel last computed of them.
"""

import csv
import json
import re
import shlex
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from xml.etree.ElementTree import ParseError

from rmcore.core.errors import DataError
from rmcore.core.extras import require_extra
from rmcore.data.readers.columns import spelling
from rmcore.data.readers.fields import WORDS_FOR_NOTHING, Reason
from rmcore.data.readers.records import RawRecord, record_of
from rmcore.data.readers.unpacking import Growth

MAX_ROW_BYTES = 64 * 2**20
"""Largest single row of a text format. A longer one is a file of another kind, and would have to fit into memory."""
MOST_CHARACTERS = 32_767
"""Limit of an Excel cell: UTF-16 units, of which most emoji have two."""
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)
_DOUBLED = re.compile(rb'[\w\x80-\xff]""|""[\w\x80-\xff]')
"""A doubled quote next to a letter: a writer that escapes quotes with backslashes never produces one."""
_SURVEY_ID = '{"ImportId":'
_LONGEST_NAME = 64
"""Characters of a cell that may be the name of a column, or a word for nothing."""
_OPENPYXL_ERRORS = (KeyError, ValueError, IndexError, TypeError, AttributeError)
"""Raised by openpyxl where a part of a workbook is not what it takes it for."""

Cells = Sequence[Any]
Wrong = tuple[Reason, str] | None
"""The reason for which a row of a table is wrong, and the place in it."""


def csv_records(
    text: TextIO, path: Path, delimiter: str | None, chunks: Callable[[], Iterator[bytes]]
) -> Iterator[RawRecord]:
    """The records of a CSV text, numbered from 1; blank lines are skipped.

    Args:
        text: opened with `newline=""`.
        path: its name, for messages.
        delimiter: None: a first line `sep=;` (Excel) says it, else the header does.
        chunks: gives the bytes of the file from its start again, to look how its quotes are written.

    Raises:
        DataError: a record's extent is uncertain, see above, or it is too long; or see `_records`.
    """
    return _records(_csv_rows(text, path, delimiter, chunks), path, _wrong_line, first=1)


def excel_records(binary: BinaryIO, path: Path) -> Iterator[RawRecord]:
    """The records of the one sheet that holds something, numbered as Excel does, from 2.

    Raises:
        DataError: the file is no workbook, is damaged, or has several sheets with rows; or see `_records`.
        ConfigError: openpyxl is not installed.
    """
    return _records(_excel_rows(binary, path), path, _wrong_cells, first=2)


def column_names(names: list[str], path: Path) -> list[str]:
    """The names of a table's columns.

    Raises:
        DataError: one is there twice.
    """
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{path} has the column {repeated[0]!r} twice: which one is meant is unknown. Rename one.")
    return names


def conversion_to_utf8(path: Path, encoding: str = "CP1252") -> str:
    """Say how to convert a text file of another encoding: a command to paste, and what to look at afterwards."""
    name = Path(path.name.removesuffix(".gz"))
    source, target = (shlex.quote(str(file)) for file in (path, path.with_name(f"{name.stem}.utf8{name.suffix}")))
    unpack, read = (f"gzip -dc {source} | ", "") if path.name.endswith(".gz") else ("", f"{source} ")
    command = f"{unpack}iconv -f {encoding} -t UTF-8 {read}> {target}"
    if encoding != "CP1252":
        return f"Convert it:\n    {command}"
    return (
        "Files of Excel and other Windows programs are most often Windows-1252. Such a file is converted by\n"
        f"    {command}\n"
        "Look at accents and quotation marks in the result; where they are wrong, name the true encoding after -f."
    )


def _records(
    rows: Iterator[Cells], path: Path, wrong: Callable[[Cells, Cells], Wrong], first: int
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
        spelled = {spelling(cell) for cell in cells if isinstance(cell, str) and len(cell) <= _LONGEST_NAME}
        num_names = sum(len(name) > 1 for name in spelled & names.keys())
        if len(spelled & names.keys()) > 1 and spelled | {""} == names.keys() | {""}:
            again = _header(cells, path)
            header = again if {*again} == {*header} else [names[spelling(name)] for name in again]
            yield RawRecord(row, None, Reason.HEADER_AGAIN, ", ".join(header))
        elif len(spelled & names.keys()) > 1 and 2 * num_names > sum(cell not in (None, "") for cell in cells):
            raise DataError(
                f"{path}: row {row} is a header again, with other columns than the first ({', '.join(map(str, cells))})"
                ": two files were joined. Write each to a file of its own."
            )
        elif problem := wrong(header, cells):
            yield RawRecord(row, None, *problem)
        elif any(cell is not None for cell in cells):
            named = zip(header, chain(cells, repeat(None)), strict=False)
            yield record_of(row, {name: None if _is_nothing(cell) else cell for name, cell in named})


def _header(cells: Cells, path: Path) -> list[str]:
    """The names of the columns, without those of the empty columns that spreadsheets write behind the last one."""
    header = ["" if cell is None else str(cell).strip() for cell in cells]
    while header and not header[-1]:
        header.pop()
    if any("\udc80" <= char <= "\udcff" for char in "".join(header)):
        raise DataError(f"{path} is not UTF-8, its header holds other bytes. {conversion_to_utf8(path)}")
    return column_names(header, path)


def _is_nothing(cell: Any) -> bool:
    return isinstance(cell, str) and len(cell) <= _LONGEST_NAME and cell.strip() in WORDS_FOR_NOTHING


def _is_of_survey(cells: Cells) -> bool:
    filled = [cell for cell in cells if cell]
    return bool(filled) and all(isinstance(cell, str) and cell.startswith(_SURVEY_ID) for cell in filled)


def _wrong_line(header: Cells, cells: Cells) -> Wrong:
    if len(cells) >= len(header) and not any(cell.strip() for cell in cells[len(header) :]):
        return None
    return Reason.NOT_CSV, f"{len(cells)} cells for {len(header)} columns: {cells[0][:80]}"


def _wrong_cells(header: Cells, cells: Cells) -> Wrong:
    for name, cell in zip(header, cells, strict=False):
        if isinstance(cell, _ErrorCell):
            return Reason.EXCEL_ERROR, f"{name}: {cell[:80]}"
        if isinstance(cell, str) and len(cell.encode("utf-16-le", "surrogatepass")) // 2 >= MOST_CHARACTERS:
            return Reason.CUT_CELL, f"{name}: {cell[:80]}"
    is_beyond = any(cell is not None for cell in cells[len(header) :])
    return (Reason.NOT_A_TABLE, f"a cell to the right of {len(header)} columns") if is_beyond else None


def _csv_rows(
    text: TextIO, path: Path, delimiter: str | None, chunks: Callable[[], Iterator[bytes]]
) -> Iterator[list[str]]:
    """The records as lists of cells, the header first. One with too few or too many cells is given as it is."""
    csv.field_size_limit(MAX_ROW_BYTES)  # process-wide in Python; the default of 128 KiB refuses long completions
    kept: list[str] = []
    lines = _lines(text, path, kept)
    filled = ((number, line) for number, line in enumerate(lines) if line.strip())
    num_before, header = next(filled, (0, ""))
    if delimiter is None and (separator := _SEPARATOR_LINE.fullmatch(header)):
        delimiter = separator[1]
        kept.clear()
        num_before, header = next(filled, (0, ""))
    delimiter = delimiter or _delimiter(header)
    rows = csv.reader(chain([header] * bool(header), lines), delimiter=delimiter, strict=True)
    quoting, escapes_are_doubled, seen = _quoting(delimiter), False, ""
    while not seen:
        try:
            cells = next(rows, None)
        except csv.Error as error:
            cells, seen = [], str(error)
        if cells is None:
            return
        record = "".join(kept)
        if "\0" in record:
            seen = seen or "NUL bytes"
        elif '"' in record and not seen and not quoting.fullmatch(record):
            seen = "a space before a quote, or a quote without its second one"
        elif '\\"' in record and not seen and not escapes_are_doubled:
            escapes_are_doubled = _doubles_quotes(chunks())
            seen = "" if escapes_are_doubled else "a quote after a backslash"
        if not seen:
            kept.clear()
        if cells and not seen:
            yield cells
    raise _damaged(path, num_before + rows.line_num - len(kept) + 1, record, delimiter, seen)


def _lines(text: TextIO, path: Path, kept: list[str]) -> Iterator[str]:
    """The lines of a text, which are put into `kept`, too, but blank ones between records; each record empties it."""
    for line in iter(lambda: text.readline(MAX_ROW_BYTES + 1), ""):
        if len(line) > MAX_ROW_BYTES:
            raise DataError(
                f"{path} has a line longer than {MAX_ROW_BYTES // 2**20} MiB: a quoted cell is not closed, or this is "
                "no CSV. Correct the quotes."
            )
        if kept or line.strip():
            kept.append(line)
        yield line


def _quoting(delimiter: str) -> re.Pattern[str]:
    """A record of cells that are quoted as a whole, or begin with no quote and have an even number of them."""
    end = re.escape(delimiter)
    quoted = r'"[^"]*+(?:""[^"]*+)*+"'
    within = rf'[^"\r\n{end}]*+'
    bare = rf'[^\S\r\n{end}]*+(?:[^\s"{end}]{within}(?:"{within}"{within})*+)?+'
    return re.compile(rf"(?:{quoted}|{bare})(?:{end}(?:{quoted}|{bare}))*+[\r\n]*+")


def _doubles_quotes(chunks: Iterator[bytes]) -> bool:
    """Whether a quote inside a cell is doubled anywhere in the file."""
    rest = b""
    for chunk in chunks:
        if _DOUBLED.search(rest + chunk):
            return True
        rest = chunk[-2:]
    return False


def _delimiter(header: str) -> str:
    """A comma, unless the header has none and has semicolons, or tabs: a file of one column holds no pairs."""
    unquoted = re.sub(r'"[^"]*"', "", header)
    others = [delimiter for delimiter in ";\t" if delimiter in unquoted]
    return others[0] if len(others) == 1 and "," not in unquoted else ","


def _damaged(path: Path, line: int, record: str, delimiter: str, seen: str) -> DataError:
    sentence = (
        f"{path} is not valid CSV in the record that begins in line {line} ({seen}): which of the following "
        "lines are rows and which are the inside of a quoted cell is uncertain, so nothing of the file is used. "
        "Put such cells in double quotes, with each quote inside doubled, or write JSON Lines."
    )
    if '\\"' not in record:
        return DataError(sentence)
    source, target = json.dumps(str(path)), json.dumps(str(path.with_name(path.name.split(".")[0] + ".jsonl")))
    read = f'pandas.read_csv({source}, sep={json.dumps(delimiter)}, escapechar="\\\\", doublequote=False)'
    write = f'to_json({target}, orient="records", lines=True)'
    return DataError(
        f"{sentence} If quotes are escaped with backslashes here (Spark, MySQL), the file is converted by\n"
        f"    python -c {shlex.quote(f'import pandas; {read}.{write}')}"
    )


class _ErrorCell(str):
    """The text of a cell whose formula failed (#NAME?, #REF!), also where a plain text began like one."""


def _excel_rows(binary: BinaryIO, path: Path) -> Iterator[tuple[Any, ...]]:
    """The cells of each row as text, numbers, truth values or None."""
    require_extra("openpyxl", "excel", f"{path}, an Excel workbook (or save it as CSV),")
    from openpyxl import load_workbook
    from openpyxl.utils.exceptions import InvalidFileException

    try:
        with zipfile.ZipFile(binary) as packed:
            Growth(path).add(sum(part.file_size for part in packed.infolist()))
        binary.seek(0)
        book = load_workbook(binary, read_only=True, data_only=True)
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # as some programs write them they are too small, and rows would be left out
        filled = [
            sheet for sheet in book.worksheets if any(any(row) for row in sheet.iter_rows(1, 1, values_only=True))
        ]
        if len(filled) == 1:
            for row in filled[0].iter_rows():
                yield tuple(_cell_value(cell) for cell in row)
    except (zipfile.BadZipFile, InvalidFileException, ParseError, *_OPENPYXL_ERRORS) as error:
        raise DataError(
            f"{path} cannot be read as an Excel workbook ({error}): it is damaged, or has another format than its name "
            "says. Save it again as .xlsx, or as CSV."
        ) from error
    if len(filled) != 1:
        titles = ", ".join(repr(sheet.title) for sheet in filled[:4]) or "none"
        raise DataError(
            f"{path} has {len(filled)} sheets with a header in their first row ({titles}), and preference data are one "
            "table: save the sheet that holds it in a file of its own, with its header in the first row."
        )


def _cell_value(cell: Any) -> Any:
    value = cell.value
    if not isinstance(value, str):
        return value
    return _ErrorCell(value) if cell.data_type == "e" else value.replace("_x000D_", "\r")  # how Excel stores it
