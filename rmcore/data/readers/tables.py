r"""Tables that programs write as CSV and TSV, as records; no cell is read as another one.

Where a record begins is known only if the record before it was read correctly: after a misplaced quote, the next
line may be the inside of a cell, and its commas would make pairs of an answer's sentences. So the first record whose
extent is uncertain ends the reading with an error that names its line:

- the text breaks the rules of quoting (RFC 4180), or ends inside a quoted cell. Quotes may be inside a cell that is not
  quoted if their number is even;
- a quote follows a backslash and no quote of the file is doubled. `"a \", b"` is then one cell of a writer that escapes
  quotes with backslashes (Spark, MySQL), and two cells of one that doubles them;
- the record contains NUL, which a text file has only where a part of it was never written.
"""

import csv
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

from rmcore.core.errors import DataError
from rmcore.data.readers.columns import spelling
from rmcore.data.readers.fields import WORDS_FOR_NOTHING, Reason
from rmcore.data.readers.records import RawRecord, record_of

MAX_ROW_BYTES = 64 * 2**20
"""Largest single row of a text format. A longer one is a file of another kind, and would have to fit into memory."""
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)
_DOUBLED = re.compile(r'\w""|""\w')
"""A doubled quote next to a letter: a writer that escapes quotes with backslashes never produces one."""
_SURVEY_ID = '{"ImportId":'
_LONGEST_NAME = 64
"""Characters of a cell that may be the name of a column, or a word for nothing."""

Cells = Sequence[str]


def csv_records(text: TextIO, path: Path, delimiter: str | None) -> Iterator[RawRecord]:
    """The records of a CSV text below its header, numbered from 1; blank lines are skipped.

    A word for a missing value is an empty cell. Files that were joined have the header of the second one as a row, and
    its order of columns holds from there on. A survey tool (Qualtrics) writes the questions and its own ids below the
    header: two more lines of it, and no rows.

    Args:
        text: opened with `newline=""`; it can be read again from its start.
        path: its name, for messages.
        delimiter: None: a first line `sep=;` (Excel) says it, else the header does.

    Raises:
        DataError: a record's extent is uncertain, see above, or it is too long; a column is there twice, the header
            holds bytes that are not UTF-8, or a row is a header with other columns.
    """
    rows = _csv_rows(text, path, delimiter)
    header = _header(next(rows, ()), path)
    names = {spelling(name): name for name in header}
    head = list(islice(rows, 2))
    is_survey = len(head) == 2 and _is_of_survey(head[1])
    for row, cells in enumerate(rows if is_survey else chain(head, rows), start=1 + 2 * is_survey):
        spelled = {spelling(cell) for cell in cells if len(cell) <= _LONGEST_NAME}
        num_names = sum(len(name) > 1 for name in spelled & names.keys())
        if len(spelled & names.keys()) > 1 and spelled | {""} == names.keys() | {""}:
            again = _header(cells, path)
            header = again if {*again} == {*header} else [names[spelling(name)] for name in again]
            yield RawRecord(row, None, Reason.HEADER_AGAIN, ", ".join(header))
        elif len(spelled & names.keys()) > 1 and 2 * num_names > sum(cell != "" for cell in cells):
            raise DataError(
                f"{path}: row {row} is a header again, with other columns than the first ({', '.join(cells)})"
                ": two files were joined. Write each to a file of its own."
            )
        elif len(cells) < len(header) or any(cell.strip() for cell in cells[len(header) :]):
            counted = f"{len(cells)} cells for {len(header)} columns: {cells[0][:80]}"
            yield RawRecord(row, None, Reason.NOT_CSV, counted)
        else:
            named = zip(header, cells, strict=False)
            yield record_of(row, {name: None if _is_nothing(cell) else cell for name, cell in named})


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


def _header(cells: Cells, path: Path) -> list[str]:
    """The names of the columns, without those of the empty columns that spreadsheets write behind the last one."""
    header = [cell.strip() for cell in cells]
    while header and not header[-1]:
        header.pop()
    if any("\udc80" <= char <= "\udcff" for char in "".join(header)):
        raise DataError(f"{path} is not UTF-8, its header holds other bytes. {conversion_to_utf8(path)}")
    return column_names(header, path)


def _is_nothing(cell: str) -> bool:
    return len(cell) <= _LONGEST_NAME and cell.strip() in WORDS_FOR_NOTHING


def _is_of_survey(cells: Cells) -> bool:
    filled = [cell for cell in cells if cell]
    return bool(filled) and all(cell.startswith(_SURVEY_ID) for cell in filled)


def _csv_rows(text: TextIO, path: Path, delimiter: str | None) -> Iterator[list[str]]:
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
    quoting, are_doubled, seen = _quoting(delimiter), False, ""
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
        elif '\\"' in record and not seen and not are_doubled:
            are_doubled = _doubles_quotes(text)
            seen = "" if are_doubled else "a quote after a backslash"
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


def _doubles_quotes(text: TextIO) -> bool:
    """Whether a quote inside a cell is doubled anywhere in the text, which continues where it was."""
    place = text.tell()
    text.seek(0)
    found = any(map(_DOUBLED.search, iter(lambda: text.readline(MAX_ROW_BYTES), "")))
    text.seek(place)
    return found


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
