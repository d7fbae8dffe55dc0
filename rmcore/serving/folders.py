"""Folders that appear whole or not at all, in a folder that a server and its publishers share."""

import fcntl
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from rmcore.core.errors import StoreError
from rmcore.core.files import atomic_folder, remove_folder, try_exclusive

LOCK_FILE = ".lock"
"""Held in common by all who write below a weights folder, so that its cleaner knows whether a hidden folder's writer
may be alive. The kernel frees it when a process dies."""


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Give a hidden folder to write into; it becomes `folder`, synced, when the block ends well, else it is removed.

    Raises:
        StoreError: there is something of that name already, or writing failed, above all because the disk is full.
    """
    try:
        with (folder.parent / LOCK_FILE).open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.exists():
                raise StoreError(f"{folder} is there already and may be in use; drop it first, or take another name.")
            with atomic_folder(folder) as temporary:
                yield temporary
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{folder} could not be written ({error}), most often because the disk is full; nothing of it is left and "
            "what was there before is untouched. Free space and try again."
        ) from error


def drop_stale(weights_folder: Path, keep: Collection[str]) -> list[str]:
    """Remove every served-* and update-* folder but those named, and what killed writers left.

    An update that is published and not yet served counts as stale unless `keep` names it, so a server drops folders
    right after an update, before it lets another one begin.

    Args:
        weights_folder: the folder that a server shares with its publishers.
        keep: names of folders that stay, such as `served-000003`.

    Returns:
        Names of the removed folders, sorted, hidden ones of killed writers included.

    Raises:
        OSError: a folder cannot be removed. It has lost its name by then, and the next call tries again.
    """
    removed = []
    for folder in sorted(weights_folder.iterdir()):
        if re.match(r"(served|update)-", folder.name) and folder.name not in keep and _is_folder(folder):
            with suppress(FileNotFoundError):  # its publisher withdrew it at the same time
                remove_folder(folder)
                removed.append(folder.name)
    with try_exclusive(weights_folder / LOCK_FILE) as nobody_writes:
        for folder in sorted(weights_folder.glob(".*.tmp")) if nobody_writes else ():
            if re.match(r"\.(served|update)-", folder.name) and _is_folder(folder):
                shutil.rmtree(folder)
                removed.append(folder.name)
    return sorted(removed)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
