"""Messages of a flow to people: lines in Prefect's log and, from the command line, in the terminal; a bar on its page.

The bar is drawn from a thread of its own, at most every 15 seconds: a server that is slow or away delays no stage and
ends no run, and the next look brings the bar up to date. A run whose API ends with it has no page, so it has no bar.
"""

import contextvars
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect import runtime
from prefect.logging import get_run_logger

from flows.prefect_api import api_is_embedded
from flows.prefect_client import progress_bar, show_state
from rmcore.core.errors import ServiceError
from tasks.device import DEVICE, Wait

CONSOLE_VARIABLE = "RM_OPT_CONSOLE"
"""Set by `rm-opt run`: print progress lines on standard output."""
PATIENCE_SECONDS, REMINDER_SECONDS = 2.0, 60.0
"""How long a stage waits before that is said, and until it is said again."""
POST_SECONDS = 15.0
"""Between two drawings of a bar."""
LAST_SECONDS = 5.0
"""How long the end of a run waits for the last one."""
Draw = Callable[[float, str], None]
"""Takes percent done and what to write next to the bar. May raise ServiceError."""


def quiet_prefect() -> None:
    """Keep Prefect's own log lines off the terminal: the command line tells failures itself, once and in words.

    A server's page of the run has them, and what is said.
    """
    logger = logging.getLogger("prefect")
    logger.handlers.clear()
    logger.propagate = False
    logging.getLogger().setLevel(logging.WARNING)
    if not api_is_embedded():
        for name in ("prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).setLevel(logging.INFO)


def say(text: str) -> None:
    """Log one line of the running flow and, under the command line, print it."""
    get_run_logger().info(text)
    if os.environ.get(CONSOLE_VARIABLE) == "1":
        print(text, flush=True)


@contextmanager
def shown_while_waiting(name: str) -> Iterator[Wait]:
    """Say what a stage waits for, and who holds it, and show it as the state of the flow run, as long as it waits.

    Gives the wait, for who waits to say what for. It is said from a thread of its own.
    """
    over = threading.Event()
    wait = Wait(over.set)

    def tell() -> None:
        seconds, shown = PATIENCE_SECONDS, False
        while not over.wait(seconds):
            if reason := wait.reason():
                say(f"{name:<10} waiting for {reason}")
                if not shown:
                    what = "the device" if reason.startswith(DEVICE) else "another run"
                    shown = show_state(f"Waiting for {what}", reason)
                seconds = REMINDER_SECONDS
        if shown:
            show_state("Running")

    # In the flow's context, from which the logger knows the run.
    teller = threading.Thread(target=contextvars.copy_context().run, args=(tell,), name="waiting", daemon=True)
    teller.start()
    try:
        yield wait
    finally:
        over.set()
        teller.join()


def say_notices(stage: str, folder: Path) -> None:
    """Say what the audit of the prepared pairs warns of, and which usable pairs were left out."""
    if stage == "prepare":
        audit = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
        for sentence in (*audit["warnings"], *audit["notices"]):
            say(sentence)


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
