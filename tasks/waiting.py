"""The reason why a stage waits: set where it waits, read by the thread that shows progress."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Reason = Callable[[], str]
"""Says what is in the way right now, as people read it; empty where nothing is."""


class Wait:
    """The wait of one stage: each part of it in turn, then its end."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self._reason: Reason = _nothing
        self._on_end = on_end

    def on(self, reason: Reason) -> None:
        """From now on it waits for what `reason` gives."""
        self._reason = reason

    def end(self) -> None:
        """Nothing is left to wait for."""
        self._reason = _nothing
        self._on_end()

    @property
    def reason(self) -> str:
        """Say what it waits for right now; empty for nothing."""
        return self._reason()


def _nothing() -> str:
    return ""


Waiting = Callable[[], AbstractContextManager[Wait]]
"""Tells people what a stage waits for while the block runs."""


def untold() -> AbstractContextManager[Wait]:
    """Tell nobody."""
    return nullcontext(Wait())
