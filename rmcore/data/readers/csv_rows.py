r"""The records of a CSV or TSV file as lists of cells, the header first.

Where a record begins is known only if the record before it was read correctly: after a misplaced quote, the next line
may be the inside of a cell, and its commas would make pairs of an answer's sentences. So the first record whose extent
is uncertain ends the reading with an error that names its line:

- the text breaks the rules of quoting (RFC 4180), or ends inside a quoted cell. Quotes may be inside a cell that is not
  quoted if their number is even;
- a quote follows a backslash and no quote of the file is doubled. `"a \", b"` is then one cell of a writer that escapes
  quotes with backslashes (Spark, MySQL), and two cells of one that doubles them;
- the record contains NUL, which a text file has only where a part of it was never written.

A record with too few or too many cells is given as it is: each of its line breaks was outside of quotes.
"""

import csv
import json
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

from rmcore.core.errors import DataError

MAX_ROW_BYTES = 64 * 2**20
"""Largest single row of a text format. A longer one is a file of another kind, and would have to fit into memory."""
MAX_BLANK_LINES = 10**6
"""Most blank lines in a row: a file of nothing else would keep the reader busy for minutes."""
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)
_DOUBLED = re.compile(rb'[\w\x80-\xff]""|""[\w\x80-\xff]')
"""A doubled quote next to a letter: a writer that escapes quotes with backslashes never produces one."""


class _Lines:
    """The lines of a text; those of the record that is being read are kept, and bounded."""

    def __init__(self, text: TextIO, path: Path) -> None:
        self._text, self._path = text, path
        self._lines: list[str] = []
        self._size = 0
        self.first = 1
        """The line that the record begins in."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(MAX_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self._lines.append(line)
        self._size += len(line)
        if self._size > MAX_ROW_BYTES:
            raise DataError(
                f"{self._path}: the record that begins in line {self.first} is longer than {MAX_ROW_BYTES // 2**20} "
                "MiB: a quoted cell is not closed, or this is no CSV. Correct the quotes."
            )
        return line

    def record(self) -> str:
        """The text of the record that was read last."""
        return "".join(self._lines)

    def next_record(self) -> None:
        """Begin the next record."""
        self.first += len(self._lines)
        self._lines, self._size = [], 0


def csv_rows(
    text: TextIO, path: Path, delimiter: str | None, chunks: Callable[[], Iterator[bytes]]
) -> Iterator[list[str]]:
    """The records of a CSV text, the header first; blank lines are skipped.

    Args:
        text: opened with `newline=""`.
        path: its name, for messages.
        delimiter: None: a first line `sep=;` (Excel) says it, else the header does.
        chunks: gives the bytes of the file from its start again, to look how its quotes are written.

    Raises:
        DataError: a record's extent is uncertain, see above, or it is too long.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # process-wide in Python; the default of 128 KiB refuses long completions
    lines = _Lines(text, path)
    header = _first_line(lines, path)
    if delimiter is None and (said := _SEPARATOR_LINE.fullmatch(header)):
        delimiter = said[1]
        lines.next_record()
        header = _first_line(lines, path)
    delimiter = delimiter or _delimiter(header)
    rows = csv.reader(chain([header] if header else [], lines), delimiter=delimiter, strict=True)
    quoting, escapes_are_doubled = _quoting(delimiter), False
    num_blank = 0
    while True:
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise _damaged(path, lines, delimiter, str(error)) from error
        record = lines.record()
        num_blank = 0 if cells else num_blank + 1
        refuse_blank_lines(path, num_blank)
        if "\0" in record:
            raise _damaged(path, lines, delimiter, "NUL bytes")
        if '"' in record and not quoting.fullmatch(record):
            raise _damaged(path, lines, delimiter, "a space before a quote, or a quote without its second one")
        if '\\"' in record and not escapes_are_doubled:
            escapes_are_doubled = _doubles_quotes(chunks())
            if not escapes_are_doubled:
                raise _damaged(path, lines, delimiter, "a quote after a backslash")
        lines.next_record()
        if cells:
            yield cells


def refuse_blank_lines(path: Path, number: int) -> None:
    """Refuse a text that has more than `MAX_BLANK_LINES` blank lines in a row.

    Raises:
        DataError: names the file.
    """
    if number > MAX_BLANK_LINES:
        raise DataError(
            f"{path} has more than {MAX_BLANK_LINES:,} blank lines in a row: it was not written whole, or is no data. "
            "Write it again without them."
        )


def _first_line(lines: _Lines, path: Path) -> str:
    """The first line that is not blank; empty at the end."""
    for number, line in enumerate(lines):
        if line.strip():
            return line
        refuse_blank_lines(path, number + 1)
        lines.next_record()
    return ""


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


def _damaged(path: Path, lines: _Lines, delimiter: str, seen: str) -> DataError:
    said = (
        f"{path} is not valid CSV in the record that begins in line {lines.first} ({seen}): which of the following "
        "lines are rows and which are the inside of a quoted cell is uncertain, so nothing of the file is used. "
        "Put such cells in double quotes, with each quote inside doubled, or write JSON Lines."
    )
    if '\\"' not in lines.record():
        return DataError(said)
    source, target = json.dumps(str(path)), json.dumps(str(path.with_name(path.name.split(".")[0] + ".jsonl")))
    read = f'pandas.read_csv({source}, sep={json.dumps(delimiter)}, escapechar="\\\\", doublequote=False)'
    write = f'to_json({target}, orient="records", lines=True)'
    return DataError(
        f"{said} If quotes are escaped with backslashes here (Spark, MySQL), the file is converted by\n"
        f"    python -c {shlex.quote(f'import pandas; {read}.{write}')}"
    )
