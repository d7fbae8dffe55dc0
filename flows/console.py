"""Messages of a flow to people: lines in Prefect's log and, from the command line, in the terminal."""

import contextvars
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.logging import get_run_logger

from flows.prefect_api import api_is_embedded
from tasks.device import Wait

CONSOLE_VARIABLE = "RM_OPT_CONSOLE"
"""Set by `rm-opt run`: print progress lines on standard output."""
PATIENCE_SECONDS, REMINDER_SECONDS = 2.0, 60.0
"""How long a stage waits before that is said, and until it is said again."""


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
    """Say what a stage waits for, and who holds it, as long as it waits.

    Gives the wait, for who waits to say what for. It is said from a thread of its own.
    """
    over = threading.Event()
    wait = Wait()

    def tell() -> None:
        seconds = PATIENCE_SECONDS
        while not over.wait(seconds):
            if reason := wait.reason():
                say(f"{name:<10} waiting for {reason}")
                seconds = REMINDER_SECONDS

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
