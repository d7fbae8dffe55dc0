"""What a flow tells people: to Prefect's log always, to the terminal when the command line started it."""

import os

from prefect.logging import get_run_logger

CONSOLE_VARIABLE = "RM_OPT_CONSOLE"
"""Set by `rm-opt run`: print progress lines on standard output."""


def say(text: str) -> None:
    """Log one line of the running flow and, under the command line, print it."""
    get_run_logger().info(text)
    if os.environ.get(CONSOLE_VARIABLE) == "1":
        print(text, flush=True)
