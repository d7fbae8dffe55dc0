"""Many readers or one writer: requests are answered side by side, and weights are exchanged when none is under way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReadWriteLock:
    """A lock for asyncio that requests share and an exchange of weights holds alone.

    A waiting exchange lets no new request in, so it comes to its turn under any load.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._readers = 0
        self._closed = False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Be inside with others, after waiting for an exchange that is under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._readers += 1
        try:
            yield
        finally:
            # Shielded: a request whose client left must still be counted out, or no exchange would ever begin.
            await asyncio.shield(self._leave())

    async def _leave(self) -> None:
        async with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Be inside alone: new requests wait from now on, and those under way are waited for."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            try:
                await self._changed.wait_for(lambda: self._readers == 0)
            except asyncio.CancelledError:
                self._closed = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            await asyncio.shield(self._open())

    async def _open(self) -> None:
        async with self._changed:
            self._closed = False
            self._changed.notify_all()
