"""A stage among machines that share a store (`RM_OPT_SHARED`): what one has committed the others take.

No machine reserves a stage. Where two compute the same one, the first commit stays and the other machine takes its
bytes (rmcore/core/shared_store.py), so that costs time and changes nothing.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from rmcore.core.errors import ConfigError, StoreError
from rmcore.core.processes import this_process
from rmcore.core.shared_store import SharedStore, saved_files
from rmcore.core.store import ArtifactRef, Store
from rmcore.core.tracking import METRICS_FILE
from rmcore.stages.stage import Stage

SHARED_VARIABLE = "RM_OPT_SHARED"
LOOK_SECONDS = 2.0
"""How often it is looked whether a running stage has saved something new."""
SENDING_SHARE = 0.1
"""Largest share of the time that is spent on sending: a large state, or a file that grew, is sent whole each time."""


@cache
def _opened(url: str) -> SharedStore:
    return SharedStore(url, this_process())


def shared_store() -> SharedStore | None:
    """The store that this machine shares with others; None where none is named.

    Raises:
        ConfigError: it is no address, or obstore is not installed.
        StoreError: it cannot be used.
    """
    url = os.environ.get(SHARED_VARIABLE)
    return _opened(url) if url else None


def named_store() -> SharedStore:
    """The shared store, for who can do nothing without one.

    Raises:
        ConfigError: none is named.
        StoreError: it cannot be used.
    """
    shared = shared_store()
    if shared is None:
        raise ConfigError(f"{SHARED_VARIABLE} names no shared store; set it to s3://bucket/prefix or file:///folder.")
    return shared


def shared_digest() -> Callable[[str, str], str | None]:
    """Give the function that looks an artifact up in the shared store, by stage and key: its digest, or None.

    Each is looked up once, and nothing is where no store is shared.
    """
    shared = shared_store()
    if shared is None:
        return lambda stage, key: None

    @cache
    def digest(stage: str, key: str) -> str | None:
        record = shared.find(stage, key)
        return None if record is None else str(record["manifest"]["digest"])

    return digest


def taken(shared: SharedStore | None, store: Store, stage: Stage, tell: Callable[[str], None]) -> bool:
    """Take a stage's artifact from the shared store, if one is shared and has it. The caller holds the key's lock."""
    began = time.monotonic()
    if shared is None or not shared.pull(store, stage.name, stage.key):
        return False
    tell(f"{stage.name} taken from {shared.url} in {time.monotonic() - began:.1f} s")
    return True


def pushed(shared: SharedStore, store: Store, stage: Stage, tell: Callable[[str], None]) -> None:
    """Commit what was computed. A store that is away costs others their time, and this run nothing."""
    name = stage.name
    try:
        if not shared.push(store, name, stage.key):
            tell(f"{name} was committed by another machine first; its files are taken")
    except StoreError as error:
        warning = f"warning: {name} is on this machine alone until `rm-opt store push`: {error}"
        tell(warning)
        print(warning, file=sys.stderr)


def share_all(store: Store, refs: Mapping[str, ArtifactRef]) -> None:
    """Push what the shared store has not: whose upload failed, that this machine had before, or that was removed.

    Raises:
        StoreError: it could not be shared.
    """
    shared = named_store()
    for name, ref in refs.items():
        if not shared.has(name, ref.key):
            shared.push(store, name, ref.key)


@contextmanager
def states_shared(shared: SharedStore, stage: Stage, out: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Begin from what another machine had saved of this stage, and share what is saved inside the block.

    A store that is away for a moment is tried again at the next look; at the end nothing is left to share.
    """
    key = stage.key
    if not stage.kept:
        yield
        return
    patterns = (*stage.kept, METRICS_FILE)
    if shared.take_state(stage.name, key, out, patterns):
        tell(f"{stage.name} resumes from what another machine had saved")
    done = threading.Event()

    def send() -> bool:
        try:
            shared.keep_state(stage.name, key, out, patterns)
        except StoreError as error:
            tell(f"warning: what {stage.name} has saved is on this machine alone so far: {error}")
            return False
        return True

    def look() -> None:
        sent: object = None
        due = time.monotonic()
        while not done.wait(LOOK_SECONDS):
            now = _saved(out, stage.kept)
            if now and now != sent and time.monotonic() >= due:
                began = time.monotonic()
                if send():
                    sent = now
                due = time.monotonic() + (time.monotonic() - began) / SENDING_SHARE

    looking = threading.Thread(target=look, name="states", daemon=True)
    looking.start()
    finished = False
    try:
        yield
        finished = True
    finally:
        done.set()
        looking.join()
        if not finished and _saved(out, stage.kept):
            tell(f"sends what {stage.name} has saved to {shared.url}")  # asked to stop: another machine may resume now
            send()


def _saved(out: Path, patterns: tuple[str, ...]) -> dict[Path, tuple[int, int]]:
    """List what is in `out` of that, with sizes and times; a file that goes meanwhile is left out."""
    found = dict[Path, tuple[int, int]]()
    for path in saved_files(out, patterns):
        with suppress(FileNotFoundError):
            stat = path.stat()
            found[path] = (stat.st_size, stat.st_mtime_ns)
    return found
