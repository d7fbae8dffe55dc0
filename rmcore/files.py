"""Bytes on disk: digests, and writes that survive a power cut."""

import hashlib
import os
from pathlib import Path


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
