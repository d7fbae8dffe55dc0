"""Ctrl-C and SIGTERM during a training or other long work: finish the current step, save the state, then stop."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 1.0
"""A second signal within this time is the first one again, forwarded by the parent process as well as the terminal."""


STOPPING = b"stopping after this step and saving its state. Press Ctrl-C again to quit immediately.\n"


class Interruption:
    """Records whether a signal requested that this work stops, which it does where nothing is lost.

    A training stops between steps, so that the saved state is that of a whole step.

    Args:
        message: for standard error, at the first signal.
    """

    def __init__(self, message: bytes = STOPPING) -> None:
        self.since: float | None = None
        self._message = message

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.since is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal: the first is recorded, a later one raises KeyboardInterrupt immediately."""
        if self.since is not None:
            if time.monotonic() - self.since > ECHO_SECONDS:
                raise KeyboardInterrupt
            return
        self.since = time.monotonic()
        # Not print: if the signal interrupts a print to stderr, a progress bar's for example, a second one to the same
        # buffered stream raises RuntimeError.
        os.write(2, self._message)


@contextmanager
def deferred_interruption(message: bytes = STOPPING) -> Iterator[Interruption]:
    """Record Ctrl-C and SIGTERM (a scheduler's notice) instead of raising them, inside the block.

    Has no effect outside the main thread, which alone receives signals. Signals that the process ignores stay ignored:
    a job that a shell started in the background must not react to the terminal's Ctrl-C.
    """
    interruption = Interruption(message)
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
