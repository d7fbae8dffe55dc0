"""Why a stage waits: a reason, set where it waits and read by the thread that shows progress, and who is in the way.

Who holds a lock of the store tells it in a note next to the lock, which is valid while the lock is held.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rmcore.core.files import write_json
from rmcore.core.store import Store

Reason = Callable[[], str]
"""Says what is in the way right now, as people read it; empty where nothing is."""
UNKNOWN = "another run"


@dataclass
class Wait:
    """The wait of one stage: what it waits for, in turn, until `end`."""

    on_end: Callable[[], None] = lambda: None
    reason: Reason = str

    def end(self) -> None:
        """Nothing is left to wait for."""
        self.reason = str
        self.on_end()


Waiting = Callable[[], AbstractContextManager[Wait]]
"""Tells people what a stage waits for while the block runs."""


@contextmanager
def noted(store: Store, lock: str, run: str) -> Iterator[None]:
    """Tell those who want the lock that `run` holds it in this process, inside the block. The caller holds the lock."""
    note = _note(store, lock)
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    write_json(note, {"run": run, "pid": os.getpid(), "since": since})
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def holder(store: Store, lock: str) -> str:
    """Who holds a lock, for example `mine-seed0 (pid 4711, since 14:02)`; empty where nobody does."""
    if store.is_free(lock):
        return ""
    try:
        held = json.loads(_note(store, lock).read_text(encoding="utf-8"))
        return f"{held['run']} (pid {held['pid']}, since {clock(datetime.fromisoformat(held['since']))})"
    except (OSError, ValueError, TypeError, KeyError):  # taken this moment
        return UNKNOWN


def same_stage(store: Store, name: str, key: str) -> str:
    """Describe the run that is computing the stage of that key, for messages; empty if there is none."""
    computed_by = holder(store, key)
    return f"the same {name}, which {computed_by} computes" if computed_by else ""


def clock(moment: datetime) -> str:
    """A moment as people say it: 14:02 today, 14:02 on 24 Nov on another day, with the year in another year."""
    now = datetime.now().astimezone()
    moment = moment.astimezone()
    if moment.date() == now.date():
        return f"{moment:%H:%M}"
    day = f"{moment:%H:%M} on {moment.day} {moment:%b}"
    return day if moment.year == now.year else f"{day} {moment.year}"


def _note(store: Store, lock: str) -> Path:
    return store.root / ".locks" / f"{lock}.json"
