"""Unpacking of compressed files, within bounds: a few megabytes can be made to unpack to any size.

Preference data as text packs 3 to 20 times smaller, and 100 times where rows repeat one another.
"""

import gzip
import io
from pathlib import Path
from typing import BinaryIO

import pyarrow.parquet as pq

from rmcore.core.errors import DataError

MAX_RATIO = 200
"""Largest size of the content, in sizes of the packed file; counts from `UNCHECKED_BYTES` on."""
UNCHECKED_BYTES = 2**28
"""So much of any file is unpacked: that takes seconds."""

ROW_BYTES = 256
"""A row of Parquet counts for so many bytes more than its values: a billion equal rows may be stored in a kilobyte."""
BATCH_BYTES = 2**28
"""Most bytes that one batch of rows of a Parquet file is decoded to, in each column."""
_PAGE_HEADER_BYTES = 8
_I32_FIELD = b"\x15"
"""The next field, of 32 bits; the first one of a page's header, its kind, takes one byte more."""


class Growth:
    """Adds up what a file unpacks to, and refuses it where that is out of proportion."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._most = max(UNCHECKED_BYTES, MAX_RATIO * path.stat().st_size)
        self._total = 0

    def add(self, number: int) -> None:
        """Count further bytes.

        Raises:
            DataError: they are too many.
        """
        self._total += number
        if self._total > self._most:
            raise DataError(
                f"{self._path} unpacks to more than {self._most // 2**20:,} MiB, {MAX_RATIO} times its size or more: "
                "that is no preference data, or made to exhaust the machine. If it is right, unpack it yourself."
            )


def rows_a_batch(file: pq.ParquetFile, binary: BinaryIO, most: int) -> int:
    """How many rows may be decoded at once: few where a dictionary could make each of them large.

    A value of a dictionary is stored once and decoded as often as it occurs, so 200 rows of 32 MB may be stored in a
    kilobyte. How large a dictionary is, only the header of its page says.
    """
    largest = 1
    for group in range(file.num_row_groups):
        for number in range(file.metadata.num_columns):
            column = file.metadata.row_group(group).column(number)
            if column.has_dictionary_page:
                largest = max(largest, _page_bytes(binary, column.dictionary_page_offset))
    return max(1, min(most, BATCH_BYTES // largest))


def _page_bytes(binary: BinaryIO, offset: int) -> int:
    """The unpacked size of the page at a place: the second field of its header, in Thrift's compact protocol."""
    place = binary.tell()
    binary.seek(offset)
    header = binary.read(_PAGE_HEADER_BYTES)
    binary.seek(place)
    if header[:1] != _I32_FIELD or header[2:3] != _I32_FIELD:
        return BATCH_BYTES  # no header that is known: row after row
    value = 0
    for position, byte in enumerate(header[3:]):
        value |= (byte & 0x7F) << (7 * position)
        if not byte & 0x80:
            break
    return value >> 1  # zigzag: twice the number, as it is not negative


class Unpacked(io.RawIOBase):
    """The content of a gzipped file, as a stream."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._gzip, self._growth = gzip.GzipFile(fileobj=raw), Growth(path)

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        """Unpack as much as there is room for; 0 at the end."""
        number = self._gzip.readinto(buffer)
        self._growth.add(number)
        return number
