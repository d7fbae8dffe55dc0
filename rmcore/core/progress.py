"""Progress bars on standard error: only on a terminal, gone when done."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRESS_VARIABLE = "RM_OPT_PROGRESS_FD"
"""Names the descriptor of a terminal to draw on, where standard error goes to a log."""
Report = Callable[[int, int, str], None]
"""How all work tells how far it is: called as report(done, total, text), where the text says what is counted or done.

`total` may be an upper bound until the last call.
"""


def silent(done: int, total: int, text: str) -> None:
    """Take a report and show nothing."""


def labelled(report: Report, text: str) -> Report:
    """`report` for a part of the work that is called `text` here, whatever it calls itself."""
    return lambda done, total, _: report(done, total, text)


def counting_on(report: Report, number: int, total: int) -> Report:
    """`report` for the part `number`, from 0, of `total` parts of one size, which count as one work."""
    return lambda done, size, text: report(number * size + done, total * size, text)


def within(report: Report, done: int, total: int, prefix: str) -> Report:
    """`report` for one of `total` parts: it stays at `done` while that runs, with the part's text after `prefix`."""
    return lambda _done, _total, text: report(done, total, f"{prefix}: {text}")


@contextmanager
def progress_bar(description: str) -> Iterator[Report]:
    """Show one bar for the block; a function that ignores its arguments where standard error is not a terminal."""
    given = os.environ.get(PROGRESS_VARIABLE)
    if given is None and not sys.stderr.isatty():
        yield silent
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


def below_the_echo() -> None:
    """Begin a line on standard error where a terminal has just shown ^C in the one before."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
