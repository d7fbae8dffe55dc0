"""Leases in an object store: who does a piece of work right now, among processes that may be on several machines.

A lease is an object that is changed only by compare-and-swap. Its holder renews it; who wants it measures by its own
clock how long it has not been renewed, so no two clocks are ever compared.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from rmcore.core.errors import StoreError
from rmcore.core.object_store import ObjectStore, mapping

LEASE_SECONDS = 60.0
"""A lease that was not renewed for so long may be taken. Its holder gives up a quarter earlier."""
RELEASE_SECONDS = 5.0
"""How long giving a lease back may take where the store is slow; it runs out anyway."""


@dataclass(slots=True)
class Lease:
    """The right to compute one artifact, for as long as it is renewed."""

    lost: threading.Event = field(default_factory=threading.Event)
    """Set when another machine may have taken it: what is computed under it has to end."""
    renewed: float = field(default_factory=time.monotonic)
    """When its last renewal began, by this process's clock."""
    _on_loss: list[Callable[[], None]] = field(default_factory=list)

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` if the lease is lost inside the block, or has been lost before."""
        self._on_loss.append(end)
        if self.lost.is_set():
            end()
        try:
            yield
        finally:
            self._on_loss.remove(end)

    def lose(self) -> None:
        """End what is computed under this lease."""
        self.lost.set()
        for end in tuple(self._on_loss):
            end()


class Leases:
    """The leases of an object store, as this process holds and sees them."""

    def __init__(
        self,
        objects: ObjectStore,
        owner: Mapping[str, str],
        has_died: Callable[[Mapping[str, str]], bool],
        seconds: float,
    ) -> None:
        """See `SharedStore`, which has one."""
        self.objects, self.owner, self.has_died, self.seconds = objects, dict(owner), has_died, seconds
        self._seen: dict[str, tuple[str, float]] = {}

    def holder(self, key: str) -> dict[str, Any] | None:
        """Who computes that artifact, as far as can be seen: its `owner`, `run` and `since`; None where nobody does."""
        found = self.objects.read(f"leases/{key}.json")
        return None if found is None or self._is_over(key, *found) else mapping(found[0])

    @contextmanager
    def hold(self, key: str, run: str) -> Iterator[Lease | None]:
        """Hold the lease of a key inside the block, and renew it; None, at once, where another process holds it."""
        place = f"leases/{key}.json"
        since = datetime.now(UTC).isoformat(timespec="seconds")
        note = partial(_note, {"owner": self.owner, "run": run, "since": since})
        found = self.objects.read(place)
        if found is None:
            token = self.objects.create(place, note())
        else:
            token = self.objects.swap(place, note(), found[1]) if self._is_over(key, *found) else None
        if token is None:
            yield None
            return
        lease, done = Lease(), threading.Event()
        renewing = threading.Thread(target=self._renew, args=(place, note, token, lease, done), daemon=True)
        renewing.start()
        threading.Thread(target=self._doubt, args=(lease, done), daemon=True).start()
        try:
            yield lease
        finally:
            done.set()
            renewing.join(timeout=RELEASE_SECONDS)

    def _renew(self, place: str, note: Callable[[], bytes], token: str, lease: Lease, done: threading.Event) -> None:
        """Renew until done, then give it back; it is lost when another process has taken it."""
        asked = list[bytes]()  # since the last answer
        while not done.wait(self.seconds / 6):
            began = time.monotonic()
            asked.append(note())
            try:
                swapped = self.objects.swap(place, asked[-1], token)
                if swapped is None and (found := self.objects.read(place)) is not None and found[0] in asked:
                    swapped = found[1]  # it was renewed, and the answer was lost on the way
            except StoreError:  # away for a moment, or for too long: see `_doubt`
                continue
            asked.clear()
            if swapped is None:
                lease.lose()
                return
            token, lease.renewed = swapped, began
        with suppress(StoreError):  # it runs out by itself
            self.objects.swap(place, b"{}", token)

    def _doubt(self, lease: Lease, done: threading.Event) -> None:
        """Give the lease up a quarter before others may take it, also while a renewal still waits for an answer."""
        while not done.wait(self.seconds / 12):
            if time.monotonic() - lease.renewed > 0.75 * self.seconds:
                lease.lose()
                return

    def _is_over(self, key: str, content: bytes, token: str) -> bool:
        """Whether a lease was given back, its holder is known to have died, or it was not renewed for long."""
        noted = mapping(content)  # a damaged one holds nothing
        first, since = self._seen.get(key, ("", 0.0))
        if first != token:
            since = time.monotonic()
            self._seen[key] = (token, since)
        owner = noted.get("owner")
        if not isinstance(owner, dict) or not {"run", "since"} <= noted.keys():
            return True
        return self.has_died(owner) or time.monotonic() - since > self.seconds


def _note(noted: Mapping[str, Any]) -> bytes:
    """A lease's content, another one at each renewal: an ETag may be a digest of it."""
    return json.dumps({**noted, "renewal": uuid.uuid4().hex}).encode()
