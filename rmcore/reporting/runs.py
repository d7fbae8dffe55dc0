"""The runs of a home, read from the records beside the reports: no server and no database is asked."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rmcore.core.errors import ConfigError
from rmcore.reporting.figures.claims import tally
from rmcore.reporting.verdict_style import VERDICT_STYLES, VerdictStyle

RECORD = "summary.json"
REPORT = "report.html"
KEY = re.compile(r"-[0-9a-f]{12}$")
"""End of a folder's name: the first digits of the run's key."""
KEY_DIGITS = 4
"""How many of them are shown."""
OPEN = VerdictStyle("open", "?")


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run: of the pipeline, of an experiment, or of a flow about a policy."""

    folder: Path
    """Holds its record and, mostly, its report."""
    finished: datetime
    record: Mapping[str, Any]
    """Everything that was found; empty where the file cannot be read."""
    problem: str | None = None
    """Why the record cannot be read."""

    @property
    def name(self) -> str:
        """Name on the command line: its folder's."""
        return self.folder.name

    @property
    def key(self) -> str:
        """First digits of the key of all that it computed; empty where its folder's name has none."""
        found = KEY.search(self.name)
        return "" if found is None else found.group()[1:]

    @property
    def report(self) -> Path | None:
        """The page to open, None where this kind of run has none."""
        page = self.folder / REPORT
        return page if page.is_file() else None

    @property
    def style(self) -> VerdictStyle:
        """Sign and tone of its verdict; open where there is none."""
        verdict = self.record.get("verdict")
        return VERDICT_STYLES.get(verdict.get("status", ""), OPEN) if isinstance(verdict, dict) else OPEN

    @property
    def headline(self) -> str:
        """Its outcome in one sentence."""
        if self.problem is not None:
            return f"its record cannot be read: {self.problem}"
        verdict = self.record.get("verdict")
        if isinstance(verdict, dict):
            return str(verdict.get("headline", ""))
        if "hypotheses" in self.record:
            return tally(self.record["hypotheses"])
        return str(verdict or self.record.get("headline") or "no verdict: it measured, and judged nothing")

    @property
    def rung(self) -> str:
        """On which rung of the ladder of evidence its verdict stands: "1 of 4", or empty."""
        verdict = self.record.get("verdict")
        return f"{verdict['rung']} of 4" if isinstance(verdict, dict) and "rung" in verdict else ""

    @property
    def status(self) -> str:
        """The verdict in a word or two: "not ready", or empty."""
        verdict = self.record.get("verdict")
        if isinstance(verdict, dict):
            return str(verdict.get("status", "")).replace("_", " ")
        return tally(self.record["hypotheses"]) if self.record.get("hypotheses") else ""

    @property
    def accuracy(self) -> Mapping[str, Any] | None:
        """Held-out pairwise accuracy with its 95 % interval, None where it was not measured."""
        metrics = self.record.get("metrics")
        found = metrics.get("pairwise_accuracy") if isinstance(metrics, dict) else None
        return found if isinstance(found, dict) and {"value", "ci_low", "ci_high"} <= found.keys() else None

    @property
    def device_seconds(self) -> float | None:
        """Seconds that its stages held the device when they were computed, cached ones too; None: unknown."""
        if "cost" in self.record and "stages" not in self.record:
            cost = self.record["cost"]
            return cost.get("device_seconds") if isinstance(cost, dict) else None
        times = [stage.get("device_seconds") for stage in self.record.get("stages", [])]
        known = [float(time) for time in times if time is not None]
        return sum(known) if known else None


def read_runs(reports: Path) -> list[Run]:
    """All finished runs below the folder of reports, the newest first; none where there is no such folder."""
    found = [_read(file) for file in reports.glob(f"*/{RECORD}")]
    return sorted(found, key=lambda run: (run.finished, run.name), reverse=True)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """How far each name has to be written: to the fourth digit of its key, further where another name begins so."""
    short = {}
    for name in names:
        keyed = KEY.search(name)
        length = len(name) if keyed is None else keyed.start() + 1 + KEY_DIGITS
        while length < len(name) and any(other != name and other.startswith(name[:length]) for other in names):
            length += 1
        short[name] = name[:length]
    return short


def find_run(runs: Sequence[Run], name: str, *, also: str = "") -> Run:
    """The run with this name or, where none is called so, the only one whose name or key begins so.

    Args:
        runs: to choose from.
        name: as it was typed.
        also: what else was looked for, for the message where there is none.

    Raises:
        ConfigError: there is none, or there are several; names them.
    """
    named = [run for run in runs if run.name == name] or [
        run for run in runs if run.name.startswith(name) or run.key.startswith(name)
    ]
    if len(named) == 1:
        return named[0]
    if named:
        raise ConfigError(f"{name!r} may be {_names(named)}; write more of the name.")
    if not runs:
        raise ConfigError(f"no run {name!r}: nothing was run yet{also}. Start with `rm-opt run`.")
    raise ConfigError(f"no run {name!r}; the newest are {_names(runs)}{also}. `rm-opt runs` lists all.")


def _names(runs: Sequence[Run], most: int = 8) -> str:
    more = f" and {len(runs) - most} more" if len(runs) > most else ""
    return ", ".join(run.name for run in runs[:most]) + more


def _read(file: Path) -> Run:
    changed = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise TypeError(f"it holds a {type(record).__name__}, not what a run found")
        finished = datetime.fromisoformat(record["created"]) if "created" in record else changed
    except (OSError, ValueError, TypeError) as error:
        return Run(file.parent, changed, {}, str(error))
    return Run(file.parent, finished if finished.tzinfo else finished.replace(tzinfo=UTC), record)
