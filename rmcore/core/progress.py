"""Progress bars on standard error: only on a terminal, gone when done."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRESS_VARIABLE = "RM_OPT_PROGRESS_FD"
"""Names the descriptor of a terminal to draw on, where standard error goes to a log."""
Report = Callable[[int, int, str], None]
"""Called as report(done, total, text)."""


@contextmanager
def progress_bar(description: str) -> Iterator[Report]:
    """Show one bar for the block; a function that ignores its arguments where standard error is not a terminal."""
    given = os.environ.get(PROGRESS_VARIABLE)
    if given is None and not sys.stderr.isatty():
        yield lambda done, total, text: None
        return
    descriptor = sys.stderr.fileno() if given is None else int(given)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        os.fdopen(os.dup(descriptor), "w") as terminal,
        Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(file=terminal), transient=True) as bar,
    ):
        task = bar.add_task(description, total=None, text="")
        yield lambda done, total, text: bar.update(task, completed=done, total=total, text=text)
