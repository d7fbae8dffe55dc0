"""How a command ends: every expected failure is one clear message, and a reader that goes away ends nothing."""

import errno
import io
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

import typer
from pydantic_core import ValidationError  # pydantic's own, without the import of pydantic

from rmcore.core.errors import INTERRUPTED, ConfigError, JudgementsWantedError, RmcoreError
from rmcore.core.files import full_places
from rmcore.core.printing import printable_lines
from rmcore.core.progress import below_the_echo

USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Exception of a wrong call: click's own class, or since typer 0.29 the one of its copy of click."""
FAILED, WAITING = 2, 3
SHOWN_CHARS = 200
"""Characters of a refused value that a message shows."""


def guard(run: Callable[[], Any]) -> int:
    """Run a command line; every expected failure becomes one clear message on standard error, never a traceback.

    Returns:
        Exit status: 0, 2 for a deliberate refusal or a wrong call, 3 where people have to answer first, 130 for
        Ctrl-C.
    """
    _print_any_character()
    try:
        result = _with_names_that_libraries_take(run)
    except RmcoreError as error:
        return _fail(str(error), WAITING if isinstance(error, JudgementsWantedError) else FAILED)
    except ValidationError as error:
        return _fail(describe_validation(error))
    except USAGE_ERROR as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except OSError as error:
        if error.errno is None:  # not the operating system's: a defect of ours
            raise
        place = error.filename or full_places() or "while writing"
        advice = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name another path or repair that one"
        return _fail(f"{error.strerror or error}: {place}. No half-written artifact was kept; {advice}.")
    if result == INTERRUPTED:  # typer makes this status of Ctrl-C, and says nothing
        below_the_echo()
        return _fail("interrupted. Finished stages and written checkpoints are kept.", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _with_names_that_libraries_take(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except UnicodeEncodeError as error:
        odd = next((given for given in sys.argv[1:] if any("\udc80" <= char <= "\udcff" for char in given)), None)
        if odd is None:
            raise
        raise ConfigError(
            f"the name {odd} is not UTF-8, and a library that has to open it takes only such names. Rename it."
        ) from error


def _print_any_character() -> None:
    """Escape what standard output cannot encode, such as names of files that are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or "utf" not in stream.encoding.lower()):
            stream.reconfigure(errors="backslashreplace")


def describe_validation(error: ValidationError) -> str:
    """One line a wrong setting: where, what was given, what is allowed."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        given = "" if isinstance(item["input"], dict) else f" (given: {_shown(item['input'])})"
        lines.append(f"{where}: {item['msg']}{given}")
    lines += [f"in {note}" for note in getattr(error, "__notes__", ())]
    return "the configuration cannot be used:\n  " + "\n  ".join(lines)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a whole number of thousands of digits"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _fail(message: str, status: int = FAILED) -> int:
    said = f"{'waiting' if status == WAITING else 'error'}: {message}"
    print(printable_lines(said), file=sys.stderr)  # it may quote data, names of files, or what a server has said
    return status


def outlive_readers() -> None:
    """Let this process write on where the reader of a pipe has gone, from now on: its work is worth more than the text.

    What is written then is lost, which is said once on standard error.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        try:
            descriptor = stream.fileno()
            mode = os.fstat(descriptor).st_mode
        except (AttributeError, OSError):  # there is none, or it is no file
            continue
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            stream.flush()
            buffer = io.BufferedWriter(_Outliving(descriptor, "wb", closefd=False))
            kept = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            setattr(sys, name, io.TextIOWrapper(buffer, **kept))


class _Outliving(io.FileIO):
    """A pipe that becomes the null device when its reader has gone, for the processes that are started later, too."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() == 1:
                print("note: standard output is not read any more; the command continues without it.", file=sys.stderr)
            return len(data)
