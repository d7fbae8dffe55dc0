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
    kept: list[str] = []
    lines = _lines(text, path, kept)
    header = next(filter(str.strip, lines), "")
    if delimiter is None and (said := _SEPARATOR_LINE.fullmatch(header)):
        delimiter = said[1]
        header = next(filter(str.strip, lines), "")
    delimiter, num_before = delimiter or _delimiter(header), len(kept) - 1
    del kept[:-1]
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
    """The lines of a text, which are put into `kept`, too; it is emptied after each record."""
    num_blank = 0
    for line in iter(lambda: text.readline(MAX_ROW_BYTES + 1), ""):
        num_blank = 0 if line.strip() else num_blank + 1
        refuse_blank_lines(path, num_blank)
        if len(line) > MAX_ROW_BYTES:
            raise DataError(
                f"{path} has a line longer than {MAX_ROW_BYTES // 2**20} MiB: a quoted cell is not closed, or this is "
                "no CSV. Correct the quotes."
            )
        kept.append(line)
        yield line


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
    said = (
        f"{path} is not valid CSV in the record that begins in line {line} ({seen}): which of the following "
        "lines are rows and which are the inside of a quoted cell is uncertain, so nothing of the file is used. "
        "Put such cells in double quotes, with each quote inside doubled, or write JSON Lines."
    )
    if '\\"' not in record:
        return DataError(said)
    source, target = json.dumps(str(path)), json.dumps(str(path.with_name(path.name.split(".")[0] + ".jsonl")))
    read = f'pandas.read_csv({source}, sep={json.dumps(delimiter)}, escapechar="\\\\", doublequote=False)'
    write = f'to_json({target}, orient="records", lines=True)'
    return DataError(
        f"{said} If quotes are escaped with backslashes here (Spark, MySQL), the file is converted by\n"
        f"    python -c {shlex.quote(f'import pandas; {read}.{write}')}"
    )
