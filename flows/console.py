"""Messages of a flow to people: in Prefect's log always, in the terminal when the command line started it."""

import contextvars
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.logging import get_run_logger

from flows.prefect_api import api_is_embedded

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
def told_while_waiting(
    name: str, waits_for: Callable[[], str], patience: float = PATIENCE_SECONDS
) -> Iterator[Callable[[], None]]:
    """Say what a stage waits for, and who holds it; gives what to call when the wait is over.

    Args:
        name: of the stage.
        waits_for: asked from a thread of its own; empty where nothing stands in the way.
        patience: seconds before it is said first.
    """
    over = threading.Event()

    def tell() -> None:
        seconds = patience
        while not over.wait(seconds):
            if found := waits_for():
                say(f"{name:<10} waits for {found}")
                seconds = REMINDER_SECONDS

    # In the flow's context, from which the logger knows the run.
    teller = threading.Thread(target=contextvars.copy_context().run, args=(tell,), name="waiting", daemon=True)
    teller.start()
    try:
        yield over.set
    finally:
        over.set()
        teller.join()


NOTICES = {"prepare": ("audit.json", "notices"), "landscape": ("curvature.json", "left_out")}
"""Stages that may go without something, and where they tell of it."""


def say_notices(stage: str, folder: Path) -> None:
    """Say what the artifact of a stage goes without, and why: usable pairs, parts for which there was no time."""
    if stage in NOTICES:
        file, name = NOTICES[stage]
        for sentence in json.loads((folder / file).read_text(encoding="utf-8")).get(name, []):
            say(sentence)
