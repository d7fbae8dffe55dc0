"""`rm-opt` as a user types it, in this process: importing torch again for each command would take minutes in all."""

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from flows.cli import app
from rmcore.cli.guard import guard


class Done(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


def rm_opt(*words) -> Done:
    """Run a command line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = guard(lambda: app([*map(str, words)], standalone_mode=False))
    return Done(status, out.getvalue(), err.getvalue())


def succeeded(*words) -> str:
    """Run a command line that has to succeed; give what it printed."""
    done = rm_opt(*words)
    assert done.status == 0, done.err
    return done.out
