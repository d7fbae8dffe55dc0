"""Pairs as the file that every command here reads without a word of advice: prompt, chosen, rejected, target_margin.

Read again by `rmcore.data.readers.sources.load_pairs` it gives equal pairs, ids and metadata included.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rmcore.core.errors import DataError
from rmcore.core.files import atomic_file
from rmcore.data.pair import PreferencePair
from rmcore.data.table import write_pairs


def check_target(out: Path, source: str, *, force: bool) -> None:
    """Refuse, before anything is read, what cannot or should not be written.

    Raises:
        DataError: another extension, the source itself, a folder, or a file that is there already and not to be
            overwritten.
    """
    if out.suffix.lower() not in (".parquet", ".jsonl"):
        raise DataError(f"{out} ends neither in .parquet nor in .jsonl, which are the forms written: name it so.")
    if out.is_dir():
        raise DataError(f"{out} is a folder, and a file is to be written: name a file.")
    read = Path(source).expanduser()
    if out.exists() and read.exists() and out.samefile(read):
        raise DataError(f"{out} is the source itself, which would be lost: name another file.")
    if out.exists() and not force:
        raise DataError(f"{out} is there already: name another file, or give --force to overwrite it.")


def write_converted(pairs: Sequence[PreferencePair], out: Path) -> None:
    """Write pairs to a `.parquet` or `.jsonl` file, whole or not at all."""
    if out.suffix.lower() == ".parquet":
        write_pairs(pairs, out)
        return
    with atomic_file(out) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(pair.to_dict(), ensure_ascii=False) + "\n" for pair in pairs)
