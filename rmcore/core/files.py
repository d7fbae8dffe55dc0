"""Bytes on disk: digests, file locks, and the one way in which files and folders appear whole or not at all."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})
"""Why a file cannot be linked though it can be read: another file system, the kernel's rule about other people's
files, too many links, a file system without links."""


def file_digest(path: Path) -> str:
    """Digest a file's bytes: 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


DIGESTS_VARIABLE = "RM_OPT_DIGESTS"
"""Names the file in which digests of large files are remembered between processes; where unset, they are not."""
REMEMBERED_FROM = 2**20
"""Bytes: smaller files are read again each time."""
SETTLED_NS = 2 * 10**9
"""A file changed less than this ago may change again under the same time: clocks of file systems are coarse."""


def known_digest(path: Path) -> str:
    """Digest a file's bytes: 64 hex digits. A large file is read only where its size or modification time is new.

    For files that are not ours, such as a backbone or a given checkpoint, which every run asks about.

    Raises:
        OSError: the file cannot be read.
    """
    stat = path.stat()
    memory = os.environ.get(DIGESTS_VARIABLE)
    if memory is None or stat.st_size < REMEMBERED_FROM:
        return file_digest(path)
    state = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    for row in reversed(_remembered(Path(memory))):
        if {name: row.get(name) for name in state} == state and isinstance(row.get("sha256"), str):
            return str(row["sha256"])
    digest = file_digest(path)
    if time.time_ns() - stat.st_mtime_ns > SETTLED_NS:
        with contextlib.suppress(OSError):  # it is read again next time
            append_json_lines(Path(memory), [state | {"sha256": digest}])
    return digest


def _remembered(memory: Path) -> list[dict[str, Any]]:
    rows: list[Any]
    try:
        rows = read_json_lines(memory)
    except (ValueError, RecursionError):  # a line was cut by a crash, and another one written after it
        rows = [None]
    if all(isinstance(row, dict) for row in rows):
        return rows
    memory.unlink(missing_ok=True)
    return []


def fsync_folder(path: Path) -> None:
    """Force one file, or the names inside one folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Force every file below `folder` and the folders themselves to disk."""
    for path in [*sorted(folder.rglob("*")), folder]:
        fsync_folder(path)


@contextmanager
def atomic_file(path: Path, *, mode: int | None = None, durable: bool = True) -> Iterator[Path]:
    """Give a hidden path to write to; it becomes `path`, synced, when the block ends well, else it is removed.

    A kill leaves the hidden file at most, and the next writer of `path` begins it anew. One writer at a time: where
    two may come, the caller holds a lock.

    Args:
        path: the file; its folder is made.
        mode: its permissions, from before the first byte is written; None: what the umask leaves.
        durable: whether it survives a power cut, which costs milliseconds; a killed process it survives anyway.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if mode is not None:
            temporary.unlink(missing_ok=True)  # of a writer that was killed: an open file would keep its readers
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield temporary
        if durable:
            fsync_folder(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a hidden folder to fill; it becomes `folder`, synced, when the block ends well, else it is removed.

    A kill leaves `.NAME.tmp`, and the next writer of that name begins it anew. No folder can be renamed onto one that
    holds files, so one that is replaced is `.NAME.old` for a moment; after a kill in that moment it is the only one.

    Args:
        folder: where; its parent is made.
        replace: whether a folder of that name may be there. It is untouched until the new one is whole.

    Raises:
        OSError: it cannot be written, or `folder` is there, holds files and is not to be replaced.
    """
    temporary, retired = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("tmp", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        fsync_tree(temporary)
        replaced = replace and folder.exists()
        if replaced:
            shutil.rmtree(retired, ignore_errors=True)
            folder.rename(retired)
        temporary.rename(folder)
        fsync_folder(folder.parent)
        if replaced:
            shutil.rmtree(retired)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str, *, mode: int | None = None, durable: bool = True) -> None:
    """Write text as UTF-8, whole or not at all; `mode` and `durable` as for `atomic_file`.

    A pipe or a device, such as /dev/stdout where a user names it, is written to: it must not be replaced by a file.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with atomic_file(path, mode=mode, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON, whole or not at all; NaN and infinity are refused, they are not JSON.

    Raises:
        ValueError: a number is not finite.
    """
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file, none where it is not there; a last line cut by a crash is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a JSONL file, whole or not at all; text stays readable, in whatever script it is."""
    with atomic_file(path, durable=False) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a JSONL file, which is made if it is not there."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def exclusive(path: Path) -> AbstractContextManager[None]:
    """Hold the file lock `path` against other threads and processes; the kernel frees it when its holder dies."""
    return _locked(path, fcntl.LOCK_EX)


def shared(path: Path) -> AbstractContextManager[None]:
    """Hold the file lock `path` together with others who share it, and against those who want it alone."""
    return _locked(path, fcntl.LOCK_SH)


@contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, operation)
        yield


@contextmanager
def try_exclusive(path: Path) -> Iterator[bool]:
    """Hold the file lock `path` inside the block if nobody else does; gives whether it is held. Never waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def is_free(path: Path) -> bool:
    """Whether nobody holds the file lock `path` right now."""
    if not path.exists():
        return True
    with try_exclusive(path) as held:
        return held


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy where that cannot be linked.

    Raises:
        OSError: `target` cannot be written.
    """
    try:
        os.link(source.resolve(), target)  # resolved: in the cache of the hub a file is a link into another folder
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Make all files of `source` files of `target` too, as `link_or_copy` does; it may be there, without them.

    Raises:
        OSError: `target` cannot be written.
    """
    shutil.copytree(
        source, target, copy_function=lambda one, other: link_or_copy(Path(one), Path(other)), dirs_exist_ok=True
    )
