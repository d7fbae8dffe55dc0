"""Bytes on disk: digests, and writes that survive a power cut."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def file_digest(path: Path) -> str:
    """Digest a file's bytes: 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON, whole or not at all; NaN and infinity are refused, they are not JSON.

    Raises:
        ValueError: a number is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    fsync_folder(temporary)
    temporary.replace(path)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the file lock `path` against other threads and processes; the kernel frees it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def try_exclusive(path: Path) -> Iterator[bool]:
    """Hold the file lock `path` inside the block if nobody else does; gives whether it is held. Never waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
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
