"""The page that lists all reports of a home, newest first, with links to each."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rmcore.core.files import exclusive, write_text
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.page import date, render_page
from rmcore.reporting.runs import INDEX, RECORD, Run, read_runs

OWNER_ONLY = 0o600


def write_index(reports: Path) -> list[Run]:
    """Rewrite the page of all finished runs below the folder `reports`; gives them, the newest first.

    Only its owner can read it, as all files there. Two runs that end at once take turns.
    """
    with exclusive(reports / ".index.lock"):
        runs = read_runs(reports)
        written = date(datetime.now(UTC).isoformat(timespec="seconds"))
        text = render_page("index.html.j2", {"rows": [run_row(run) for run in runs], "written": written})
        write_text(reports / INDEX, text, mode=OWNER_ONLY, durable=False)
        os.utime(reports / INDEX)  # not older than the folder, which changed when the page took its name
    return runs


def run_row(run: Run) -> dict[str, Any]:
    """Make a run's row of the page."""
    accuracy, interval = numbers.estimate("pairwise_accuracy", run.accuracy, "share") if run.accuracy else ("", "")
    target = run.report or run.folder / RECORD
    name = os.fsencode(run.name)  # which need not be UTF-8, as the page is
    return {
        "name": name.decode(errors="replace"),
        "address": f"./{quote(name)}/{target.name}",
        "finished": run.finished.astimezone(UTC).strftime("%Y-%m-%d %H:%M"),
        "style": run.style,
        "judged": bool(run.status),
        "headline": run.headline,
        "rung": run.rung,
        "accuracy": accuracy,
        "interval": interval,
        "device_time": numbers.duration(run.device_seconds),
    }
