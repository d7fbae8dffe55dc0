"""Rows of an Excel workbook (.xlsx), one after the other, as the cells hold them.

Excel cuts what is longer than a cell may be without a word, so a text of exactly that length is not trusted. Formulas
give what Excel last computed of them.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree.ElementTree import ParseError

from rmcore.core.errors import DataError
from rmcore.core.extras import require_extra
from rmcore.data.readers.unpacking import Growth

MOST_CHARACTERS = 32_767
"""A cell holds no more, by Excel's own limits: UTF-16 units, of which most emoji have two."""
_OF_DAMAGE = (KeyError, ValueError, IndexError, TypeError, AttributeError)
"""Raised by openpyxl where a part of a workbook is not what it takes it for."""


class ErrorCell(str):
    """The text of a cell whose formula failed (#NAME?, #REF!), also where a plain text began like one."""


def excel_rows(binary: BinaryIO, path: Path) -> Iterator[tuple[Any, ...]]:
    """Return the cells of each row of the one sheet that holds something, as text, numbers, truth values or None.

    Raises:
        DataError: the file is no workbook, is damaged, or has several sheets with rows.
        ConfigError: openpyxl is not installed.
    """
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
                yield tuple(_value(cell) for cell in row)
    except (zipfile.BadZipFile, InvalidFileException, ParseError, *_OF_DAMAGE) as error:
        raise DataError(
            f"{path} cannot be read as an Excel workbook ({error}): it is damaged, or has another format than its name "
            "says. Save it again as .xlsx, or as CSV."
        ) from error
    if len(filled) != 1:
        named = ", ".join(repr(sheet.title) for sheet in filled[:4]) or "none"
        raise DataError(
            f"{path} has {len(filled)} sheets with a header in their first row ({named}), and preference data are one "
            "table: save the sheet that holds it in a file of its own, with its header in the first row."
        )


def is_cut(cell: Any) -> bool:
    """Whether a text has as many UTF-16 units as a cell holds."""
    return isinstance(cell, str) and len(cell.encode("utf-16-le", "surrogatepass")) // 2 >= MOST_CHARACTERS


def _value(cell: Any) -> Any:
    value = cell.value
    if not isinstance(value, str):
        return value
    return ErrorCell(value) if cell.data_type == "e" else value.replace("_x000D_", "\r")  # how Excel stores it
