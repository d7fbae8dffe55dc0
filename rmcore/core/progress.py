"""Progress on standard error: a bar on a terminal, gone when done; elsewhere a line every quarter of a minute."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from rmcore.core.printing import printable_lines

PROGRESS_VARIABLE = "RM_OPT_PROGRESS_FD"
"""Names the descriptors to show progress on, separated by commas, where standard error goes to a log."""
LINE_SECONDS = 15.0
"""Between the lines of a long work whose standard error is no terminal."""
Report = Callable[[int, int, str], None]
"""How all work tells how far it is: called as report(done, total, text), where the text says what is counted or done.

`total` may be an upper bound until the last call.
"""


def silent(done: int, total: int, text: str) -> None:
    """Take a report and show nothing."""


def report_left_out(count: int, what: str, first: str, reader: str = "this model") -> None:
    """Say on stderr how many of the data a model cannot read, with the first one and its reason."""
    said = f"warning: {count} {what} cannot be read by {reader} and are left out; {first}"
    print(printable_lines(said), file=sys.stderr)


def labelled(report: Report, text: str) -> Report:
    """`report` for a part of the work that is called `text` here, whatever it calls itself."""
    return lambda done, total, _: report(done, total, text)


def prefixed(report: Report, prefix: str) -> Report:
    """`report` for a part of the work whose own text follows `prefix`."""
    return lambda done, total, text: report(done, total, f"{prefix}: {text}")


def counting_on(report: Report, number: int, total: int) -> Report:
    """`report` for the part `number`, from 0, of `total` parts of one size, which count as one work."""
    return lambda done, size, text: report(number * size + done, total * size, text)


def within(report: Report, done: int, total: int, prefix: str) -> Report:
    """`report` for one of `total` parts: it stays at `done` while that runs, with the part's text after `prefix`."""
    return lambda _done, _total, text: report(done, total, f"{prefix}: {text}")


@contextmanager
def progress_bar(description: str) -> Iterator[Report]:
    """Show how far the block is: one bar on a terminal, elsewhere a line every `LINE_SECONDS`, whatever is reported."""
    given = os.environ.get(PROGRESS_VARIABLE)
    descriptors = [progress_descriptor()] if given is None else [int(one) for one in given.split(",")]
    with ExitStack() as shown:
        reports = [shown.enter_context(_shown_on(one, description)) for one in descriptors if one is not None]

        def report(done: int, total: int, text: str) -> None:
            for show in reports:
                show(done, total, text)

        yield report


@contextmanager
def _shown_on(descriptor: int, description: str) -> Iterator[Report]:
    if not os.isatty(descriptor):
        with progress_lines(description, descriptor, LINE_SECONDS) as report:
            yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    plain = partial(TextColumn, markup=False)  # names may have brackets
    columns = (plain("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        os.fdopen(os.dup(descriptor), "w") as terminal,
        Progress(*columns, plain("{task.fields[text]}"), console=Console(file=terminal), transient=True) as bar,
    ):
        task = bar.add_task(description, total=None, text="")
        yield lambda done, total, text: bar.update(task, completed=done, total=total, text=text)


def progress_descriptor() -> int | None:
    """The descriptor of standard error; None where a test or a notebook has put an object without one in its place."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # io.UnsupportedOperation is both of the latter
        return None


@contextmanager
def progress_lines(description: str, out: int, seconds: float) -> Iterator[Report]:
    """Write a line to a descriptor every so many seconds while the block runs, also while nothing is reported."""
    began = time.monotonic()
    reports: list[tuple[float, int, int, str]] = []  # the first one and the last one: what was resumed is not counted
    ended = threading.Event()

    def report(done: int, total: int, text: str) -> None:
        # One that falls is of another part of the work, which counts from its own beginning.
        first = reports[:1] if reports and done >= reports[-1][1] else []
        reports[:] = [*first, (time.monotonic(), done, total, text)]

    def write() -> None:
        while not ended.wait(seconds):
            try:
                os.write(out, f"{description:<10} {_line(list(reports), time.monotonic() - began)}\n".encode())
            except OSError:  # its reader has gone: the work is what counts
                return

    writer = threading.Thread(target=write, name="progress", daemon=True)
    writer.start()
    try:
        yield report
    finally:
        ended.set()
        writer.join(timeout=1.0)  # a pipe that is full and not read would hold it for ever


def _line(reports: list[tuple[float, int, int, str]], elapsed: float) -> str:
    since = f"{duration(elapsed)} so far"
    if not reports:
        return f"begins, {since}"
    (first, started, _, _), (last, done, total, text) = reports[0], reports[-1]
    counted = f"{done:,} of {total:,}{f' · {text}' if text else ''}, {since}"
    if done <= started or done >= total:
        return counted
    return f"{counted}, about {duration((last - first) * (total - done) / (done - started))} left"


def duration(seconds: float) -> str:
    """Seconds as 3.2 s, 4 min 05 s or 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def below_the_echo() -> None:
    """Begin a line on standard error where a terminal has just shown ^C in the one before."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
