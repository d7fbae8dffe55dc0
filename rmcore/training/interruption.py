"""Ctrl-C and SIGTERM wait for the end of the step, so that what is saved is a whole step and nothing between."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 1.0
"""A signal this soon after the first is the same request, passed on by the parent process as well as the terminal."""


class Interruption:
    """Whether someone asked this training to stop."""

    def __init__(self) -> None:
        self.since: float | None = None

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.since is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal: the first is noted, the second one ends the training at once."""
        if self.since is not None:
            if time.monotonic() - self.since > ECHO_SECONDS:
                raise KeyboardInterrupt
            return
        self.since = time.monotonic()
        # Not print: it would raise RuntimeError where it interrupts a print to the same stream, a progress bar's.
        os.write(2, b"stopping after this step; its state is saved. Once more ends at once.\n")


@contextmanager
def deferred_interruption() -> Iterator[Interruption]:
    """Defer Ctrl-C and SIGTERM (a scheduler's notice) inside the block; in other threads than the main one, nothing.

    What is ignored stays so: a job that a shell started in the background is not to hear the terminal's Ctrl-C.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    heard = [number for number in CAUGHT if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interruption.note) for number in heard}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
