"""Bytes on disk: digests, file locks, and the one way in which files and folders appear whole or not at all."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
"""Names the file in which digests of large files, and of code, are remembered between processes; default: one in the
user's cache."""
REMEMBERED_FROM = 2**20
"""Bytes: smaller files are read again each time."""
SETTLED_NS = 2 * 10**9
"""A file changed less than this ago may change again under the same time: clocks of file systems are coarse."""


def known_digest(path: Path) -> str:
    """Digest a file's bytes, as `known_digests` does."""
    [digest] = known_digests([path])
    return digest


def known_digests(paths: Iterable[Path]) -> list[str]:
    """Digest the bytes of files: 64 hex digits each. A large file is read only where it is another one, or was changed.

    For files that are asked about in every run, such as the weights of a backbone or of a checkpoint. Any program may
    set a modification time, and a copy may keep it; the time of change (ctime) is the kernel's. A new name or a new
    hard link changes that, too, and costs one reading. What is remembered is read once for all.

    Raises:
        OSError: a file cannot be read.
    """
    memory = digests_memory()
    known: dict[str, Any] | None = None
    reading = threading.Lock()

    def digest_of(path: Path) -> str:
        nonlocal known
        stat = path.stat()
        if stat.st_size < REMEMBERED_FROM:
            return file_digest(path)
        with reading:
            if known is None:
                known = {str(row.get("file")): row.get("sha256") for row in remembered(memory)}
        state = f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        if isinstance(digest := known.get(state), str):
            return digest
        digest = file_digest(path)
        if time.time_ns() - stat.st_ctime_ns > SETTLED_NS:
            remember(memory, {"file": state, "path": str(path.resolve()), "sha256": digest})
        return digest

    with ThreadPoolExecutor() as pool:  # hashlib lets other threads run
        return list(pool.map(digest_of, paths))


def digests_memory() -> Path:
    """The file in which digests are remembered: what it has may be computed again."""
    named = os.environ.get(DIGESTS_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rm-opt" / "digests.jsonl"


def remembered(memory: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file that several programs append to; one that is damaged is removed, and has none."""
    rows: list[Any]
    try:
        rows = read_json_lines(memory)
    except (ValueError, RecursionError):  # a line was cut by a crash, and another one written after it
        rows = [None]
    if all(isinstance(row, dict) for row in rows):
        return rows
    memory.unlink(missing_ok=True)
    return []


MEMORY_BYTES = 2**23
"""Size from which on a memory begins again: each edit of a module and each new file adds a row that stays."""


def remember(memory: Path, row: Mapping[str, Any]) -> None:
    """Append a row; nothing where that cannot be written."""
    with contextlib.suppress(OSError):  # it is computed again next time
        memory.parent.mkdir(parents=True, exist_ok=True)
        if memory.is_file() and memory.stat().st_size > MEMORY_BYTES:
            memory.unlink()
        append_json_lines(memory, [row])


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


TEMPORARY = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{16})?\.tmp", re.DOTALL)
LONGEST_NAME = 200
"""Bytes of a file's name that its temporaries repeat: with what is added they stay below the 255 of a file system."""


def hidden_name(path: Path) -> Path:
    """Return a path in the same folder that nothing else has: `.NAME.<16 random hex digits>.tmp`."""
    name = os.fsdecode(os.fsencode(path.name)[:LONGEST_NAME])
    return path.with_name(f".{name}.{secrets.token_hex(8)}.tmp")


@contextmanager
def _own_temporary(path: Path, make: Callable[[Path], int]) -> Iterator[Path]:
    """Give a hidden path that this writer alone has made, locked until the end of the block.

    The lock says that the writer is alive, so that the next one can remove what a killed writer left, and no more. A
    file is locked a moment after it was made; one that was removed in that moment is made again.

    Args:
        path: what the hidden path is for; its folder is made.
        make: makes the path, refusing one that is there or is a link, and gives an open descriptor of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, lambda name: name == os.fsdecode(os.fsencode(path.name)[:LONGEST_NAME]))
    while True:
        temporary = hidden_name(path)
        try:
            descriptor = make(temporary)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            continue
        try:
            _lock_if_possible(descriptor)
            if _is_at(temporary, descriptor):
                yield temporary
                return
        finally:
            os.close(descriptor)


def _lock_if_possible(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file or folder; False where another process holds it, or where the file system cannot (NFS)."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_abandoned(folder: Path, belongs: Callable[[str], bool]) -> list[str]:
    """Remove the temporaries in `folder` whose writer was killed; what a living writer works on stays.

    Args:
        folder: where they are.
        belongs: whether a temporary of the file or folder of this name is one of the caller's.

    Returns:
        The names of what was removed, sorted.
    """
    removed = []
    for path in sorted(folder.glob(".*.tmp")):
        found = TEMPORARY.fullmatch(path.name)
        if found is None or not belongs(found["name"]):
            continue
        with contextlib.suppress(OSError):  # another process was faster, or it is a link, which is none of ours
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _lock_if_possible(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(path, descriptor):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    removed.append(path.name)
            finally:
                os.close(descriptor)
    return removed


def remove_folder(folder: Path) -> None:
    """Remove a folder that loses its name first, so that no reader takes half of it for the whole.

    Raises:
        OSError: it is not there, or cannot be removed; it has lost its name by then.
    """
    nameless = hidden_name(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock_if_possible(descriptor)  # `remove_abandoned` leaves it to this process
        folder.rename(nameless)
        shutil.rmtree(nameless)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path, *, mode: int | None = None, durable: bool = True) -> Iterator[Path]:
    """Give a hidden path to write to; it becomes `path`, synced, when the block ends well, else it is removed.

    Each writer has a path of its own, so of several at once each writes a whole file and the last one's stays. A kill
    leaves the hidden file at most, and the next writer of `path` removes it.

    Args:
        path: the file; its folder is made.
        mode: its permissions, from before the first byte is written; None: what the umask leaves.
        durable: whether it survives a power cut, which costs milliseconds; a killed process it survives anyway.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with _own_temporary(path, lambda place: os.open(place, flags, 0o666 if mode is None else mode)) as temporary:
        try:
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

    Each writer has a folder of its own; a kill leaves it, and the next writer of that name removes it. No folder can be
    renamed onto one that holds files, so one that is replaced is `.NAME.old` for a moment; after a kill in that moment
    it is the only one.

    Args:
        folder: where; its parent is made.
        replace: whether a folder of that name may be there. It is untouched until the new one is whole.

    Raises:
        OSError: it cannot be written, or `folder` is there, holds files and is not to be replaced.
    """
    with _own_temporary(folder, _make_folder) as temporary:
        try:
            yield temporary
            fsync_tree(temporary)
            parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _lock_if_possible(parent)  # two that replace one folder take turns
                replaced = folder if replace and folder.exists() else None
                retired = folder.with_name(f".{folder.name}.old")
                if replaced is not None:
                    shutil.rmtree(retired, ignore_errors=True)
                rename_onto(temporary, folder, replaced, retired)
                os.fsync(parent)
            finally:
                os.close(parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def private_folder(path: Path) -> Iterator[Path]:
    """Give a folder, in a hidden one for `path`, that only this user may enter; it is removed when the block ends.

    A kill leaves it, and the next one for that path removes it.
    """
    with _own_temporary(path, partial(_make_folder, mode=0o700)) as hidden:
        folder = hidden / path.name  # the hidden one is locked, as its parent is by who writes a folder
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _make_folder(place: Path, mode: int = 0o777) -> int:
    place.mkdir(mode)
    return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def rename_onto(new: Path, folder: Path, replaced: Path | None, retired: Path) -> None:
    """Name the folder `new` `folder`, and remove the folder `replaced`, which is called `retired` for a moment.

    Raises:
        OSError: it could not be named so, and `replaced` has its name again.
    """
    if replaced is not None:
        replaced.rename(retired)
    try:
        new.rename(folder)
    except BaseException:
        if replaced is not None:
            retired.rename(replaced)
        raise
    if replaced is not None:
        fsync_folder(folder.parent)
        shutil.rmtree(retired)


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
    r"""Rows of a JSONL file, none where it is not there; a last line cut by a crash is left out.

    Lines end at `\n` alone: a text in them may hold the other characters that `str.splitlines` splits at (U+2028).
    """
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


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
    """Hold the file lock `path` inside the block if nobody else does; gives whether it is held. Never waits.

    The lock that is held is the file of that name: where its holder removed it meanwhile, a new one is made.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = path.open("a")
        except FileNotFoundError:  # the folder was removed since
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if not _is_at(path, lock.fileno()):
                continue
            yield True
            return


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


def full_places(least: int = 2**20) -> str:
    """The temporary folder, /dev/shm and the current folder where they have less than `least` bytes free; "" if none.

    An error of writing to an open file says not which file that was.
    """
    places = {"TMPDIR": os.environ.get("TMPDIR") or "/tmp", "shared memory": "/dev/shm", "the current folder": "."}  # noqa: S108
    full = []
    for name, place in places.items():
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(place).free
            if free < least:
                full.append(f"{name} ({os.path.abspath(place)}) has {free:,} bytes free")
    return ", ".join(full)


def read_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object of a file; None where there is none, or something else is in it."""
    with contextlib.suppress(OSError):
        return parse_object(path.read_bytes())
    return None


def parse_object(content: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # the latter: nested deeper than JSON can be read
        return None
    return found if isinstance(found, dict) else None
