"""An event loop in a thread, for calls that wait: their caller may be in a loop of its own, as notebooks are."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for the threads of a program; `close` it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        # A daemon, so that a program which forgets to close it can still end.
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin `work` in the loop, and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work` in the loop and wait for it; where the wait ends, as by Ctrl-C, so does the work."""
        done = self.begin(work)
        try:
            return done.result()
        finally:
            done.cancel()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """End all that runs, also what Ctrl-C left before its caller had the future of it; then do `last`, and end."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        self.begin(end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
