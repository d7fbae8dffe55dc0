"""What a flow tells people: to Prefect's log always, to the terminal when the command line started it."""

import json
import logging
import os
from pathlib import Path

from prefect.logging import get_run_logger

CONSOLE_VARIABLE = "RM_OPT_CONSOLE"
"""Set by `rm-opt run`: print progress lines on standard output."""


def quiet_prefect() -> None:
    """Keep Prefect's own log lines off the terminal: the command line tells failures itself, once and in words."""
    logger = logging.getLogger("prefect")
    logger.handlers.clear()
    logger.propagate = False
    logging.getLogger().setLevel(logging.WARNING)


def say(text: str) -> None:
    """Log one line of the running flow and, under the command line, print it."""
    get_run_logger().info(text)
    if os.environ.get(CONSOLE_VARIABLE) == "1":
        print(text, flush=True)


def say_notices(prepared: Path) -> None:
    """Say which usable pairs the prepared data go without, and why."""
    for sentence in json.loads((prepared / "audit.json").read_text(encoding="utf-8"))["notices"]:
        say(sentence)
