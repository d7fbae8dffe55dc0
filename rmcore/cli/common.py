"""Parts that all commands share: help texts from the config, printing numbers, one way to fail."""

import errno
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table

from rmcore.core.errors import RmcoreError
from rmcore.core.files import write_json
from rmcore.core.metrics import floored
from rmcore.core.progress import below_the_echo
from rmcore.reporting.figures.numbers import nothing_found

USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Exception of a wrong call: click's own class, or since typer 0.29 the one of its copy of click."""
FAILED = 2
INTERRUPTED = 130
SHOWN_CHARS = 200
"""Characters of a refused value that a message shows."""


def setting(model: type[BaseModel], name: str, *flags: str) -> Any:
    """Make an option whose help and lower bound are those of the config field `name`."""
    field = model.model_fields[name]
    least = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    return typer.Option(*flags, help=field.description, min=least)


def guard(run: Callable[[], Any]) -> int:
    """Run a command line; every expected failure becomes one clear message on standard error, never a traceback.

    Returns:
        Exit status: 0, 2 for a deliberate refusal or a wrong call, 130 for Ctrl-C.
    """
    try:
        result = run()
    except RmcoreError as error:
        return _fail(str(error))
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
        place = error.filename or "while writing"
        advice = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name another path or repair that one"
        return _fail(f"{error.strerror or error}: {place}. No half-written artifact was kept; {advice}.")
    if result == INTERRUPTED:  # typer makes this status of Ctrl-C, and says nothing
        below_the_echo()
        return _fail("interrupted. Finished stages and written checkpoints are kept.", INTERRUPTED)
    return result if isinstance(result, int) else 0


def describe_validation(error: ValidationError) -> str:
    """One line a wrong setting: where, what was given, what is allowed."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        given = "" if isinstance(item["input"], dict) else f" (given: {_shown(item['input'])})"
        lines.append(f"{where}: {item['msg']}{given}")
    return "the configuration cannot be used:\n  " + "\n  ".join(lines)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a whole number of thousands of digits"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def printable(text: str) -> str:
    """Put a question mark for what of a text cannot be printed: a data file must not drive the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def write_report_json(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write a command's result for programs, where `--json` asks for it."""
    if path is not None:
        write_json(path, record)


def print_metrics(title: str, metrics: Mapping[str, Mapping[str, Any]]) -> None:
    """Print metrics with their 95 % intervals as a table."""
    table = Table("metric", "value", "95 % interval", "pairs", title=title, title_justify="left")
    for name, entry in metrics.items():
        if entry["value"] is None:
            table.add_row(name, "-", entry.get("reason") or "", str(entry.get("num", "")))
            continue
        value, interval = shown_numbers(name, entry)
        table.add_row(name, value, interval.replace("[", r"\["), str(entry.get("num", "")))
    Console().print(table)


def shown_numbers(name: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    """The value of a metric and its 95 % interval, empty where there is none: ("0.712", "[0.690, 0.734]").

    Where nothing was found of an error, ("0.00", "upper end 0.041").
    """
    found = nothing_found(name, entry)
    if found is not None:
        return found
    low, high = floored(name, entry["ci_low"]), entry["ci_high"]
    return f"{entry['value']:.4g}", "" if low is None else f"[{low:.4g}, {high:.4g}]"


def _fail(message: str, status: int = FAILED) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
