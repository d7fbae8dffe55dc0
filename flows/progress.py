"""How far a flow run is, as a bar on its page: the parts that are done of all, and the share of those that run.

The bar is drawn from a thread of its own, at most every 15 seconds: a server that is slow or away delays no stage and
ends no run, and the next look brings the bar up to date. A run whose API ends with it has no page, so it has no bar.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from prefect import runtime

from flows.prefect_api import api_is_embedded
from flows.prefect_client import progress_bar
from rmcore.core.errors import ServiceError

POST_SECONDS = 15.0
"""Between two drawings of a bar."""
LAST_SECONDS = 5.0
"""How long the end of a run waits for the last one."""
Draw = Callable[[float, str], None]
"""Takes percent done and what to write next to the bar. May raise ServiceError."""


class Progress:
    """How much of a number of parts of one work is done; parts may run side by side."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._running: dict[str, float] = {}
        self._lock = threading.Lock()
        self.changed = threading.Event()
        """Set at each change, and cleared by the thread that has seen it."""

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[float], None]]:
        """One part runs inside the block; gives what to call with the share of it that is done, from 0 to 1."""
        self._hear(name, 0.0)
        try:
            yield lambda share: self._hear(name, share)
        finally:
            with self._lock:
                del self._running[name]
                self._done += 1
            self.changed.set()

    def _hear(self, name: str, share: float) -> None:
        with self._lock:
            self._running[name] = share
        self.changed.set()

    def shown(self) -> tuple[float, str]:
        """Percent done, and the same in words.

        >>> progress = Progress("stages", 4)
        >>> with progress.part("train") as hear:
        ...     hear(0.5)
        ...     progress.shown()
        (12.5, '0 of 4 stages done; train at 50 %')
        """
        with self._lock:
            percent = 100 * (self._done + sum(self._running.values())) / max(1, self._total)
            running = ", ".join(f"{name} at {share:.0%}".replace("%", " %") for name, share in self._running.items())
            return min(100.0, percent), f"{self._done} of {self._total} {self._what} done" + (
                f"; {running}" if running else ""
            )


@contextmanager
def shown_progress(what: str, total: int) -> Iterator[Progress]:
    """Show on the page of this flow run how far the block is with `total` parts, which are called `what`."""
    progress = Progress(what, total)
    if api_is_embedded() or not total:
        yield progress
        return
    with drawn(progress, progress_bar(str(runtime.flow_run.id)), POST_SECONDS):
        yield progress


@contextmanager
def drawn(progress: Progress, draw: Draw, seconds: float) -> Iterator[None]:
    """Draw a progress while the block runs where it changed, at most every so many seconds, and once at the end."""
    ended = threading.Event()

    def look() -> None:
        while True:
            progress.changed.wait()
            progress.changed.clear()
            is_last = ended.is_set()
            with suppress(ServiceError):  # the run itself says so where it needs the server
                draw(*progress.shown())
            if is_last:
                return
            ended.wait(seconds)

    drawing = threading.Thread(target=look, name="drawing", daemon=True)
    drawing.start()
    try:
        yield
    finally:
        ended.set()
        progress.changed.set()
        drawing.join(timeout=LAST_SECONDS)
