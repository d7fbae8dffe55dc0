"""The runs of a home, read from the records next to the reports: no server and no database is needed."""

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

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
MOST_BYTES = 2**27
"""A record that is larger is not read: those of studies with hundreds of cells have a few MB."""
YEARS = range(1971, 9000)
"""Years of a moment that every time zone can show."""


def _whole(text: str) -> str:
    """The text, where every character of it can be written: JSON can escape half of one."""
    text.encode()
    return text


Number = Annotated[float, Field(allow_inf_nan=False)] | None
Text = Annotated[str, AfterValidator(_whole)]


class _Part(BaseModel):
    """A part of a record: what is said here of a field is checked, other fields may be anything."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Verdict(_Part):
    status: Text = ""
    headline: Text = ""
    rung: Annotated[int, Field(ge=1, le=4)] | None = None


class _Accuracy(_Part):
    value: Number = None
    ci_low: Number = None
    ci_high: Number = None


class _Metrics(_Part):
    pairwise_accuracy: _Accuracy | None = None


class _Claim(_Part):
    verdict: Text


class _Stage(_Part):
    name: str | None = None
    key: str | None = None
    device_seconds: Number = None


class _Cost(_Part):
    device_seconds: Number = None


class _Record(_Part):
    """The fields that are shown of a run, or read to find it."""

    created: str | None = None
    verdict: _Verdict | Text | None = None
    headline: Text | None = None
    hypotheses: list[_Claim] = []
    metrics: _Metrics | list[Any] | None = None
    stages: list[_Stage] = []
    cost: _Cost | None = None
    config: dict[str, Any] = {}
    environment: dict[str, Any] = {}


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
    def verdict(self) -> Mapping[str, Any] | None:
        """Its verdict of the ladder; None where it has none, or one in words alone."""
        verdict = self.record.get("verdict")
        return verdict if isinstance(verdict, dict) else None

    @property
    def style(self) -> VerdictStyle:
        """Sign and tone of its verdict; open where there is none."""
        return VERDICT_STYLES.get((self.verdict or {}).get("status", ""), OPEN)

    @property
    def headline(self) -> str:
        """Its outcome in one sentence."""
        if self.problem is not None:
            return f"its record cannot be read: {self.problem}"
        if self.verdict is not None:
            return str(self.verdict.get("headline", ""))
        if "hypotheses" in self.record:
            return tally(self.record["hypotheses"])
        return str(
            self.record.get("verdict") or self.record.get("headline") or "no verdict: it measured, and judged nothing"
        )

    @property
    def rung(self) -> str:
        """Evidence level of its verdict: "1 of 4", or empty."""
        rung = (self.verdict or {}).get("rung")
        return "" if rung is None else f"{rung} of 4"

    @property
    def status(self) -> str:
        """The verdict in a word or two: "not ready", or empty."""
        if self.verdict is not None:
            return str(self.verdict.get("status", "")).replace("_", " ")
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
    """All finished runs below the folder of reports, the newest first; none where there is no such folder.

    A record that is damaged is a run, too: its `problem` says why it cannot be read.
    """
    if not reports.is_dir():
        return []
    # Not by `glob`, which passes over a link that leads nowhere.
    found = [_read(folder / RECORD) for folder in reports.iterdir() if os.path.lexists(folder / RECORD)]
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
    finished = datetime.fromtimestamp(0, UTC)
    try:
        state = file.lstat()
        finished = _moment(datetime.fromtimestamp(state.st_mtime, UTC))
        if not stat.S_ISREG(state.st_mode):
            raise ValueError(f"{RECORD} is no file of its own, but a folder, a link or a device")
        if state.st_size > MOST_BYTES:
            raise ValueError(f"{RECORD} has {state.st_size} bytes, and no record of a run has more than {MOST_BYTES}")
        record = json.loads(file.read_bytes())
        if not isinstance(record, dict):
            raise TypeError(f"it holds a {type(record).__name__}, not what a run found")
        _Record.model_validate(record)
        if record.get("created") is not None:
            finished = _moment(datetime.fromisoformat(record["created"]))
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        place = ".".join(part for part in map(str, first["loc"]) if not part.startswith("_"))
        return Run(file.parent, finished, {}, f"{place} is not as a run writes it: {first['msg']}")
    except RecursionError:
        return Run(file.parent, finished, {}, "it is nested too deeply")
    except (OSError, ValueError, TypeError, OverflowError) as error:
        return Run(file.parent, finished, {}, str(error))
    return Run(file.parent, finished, record)


def _moment(time: datetime) -> datetime:
    """The moment in UTC, which a record without a zone means.

    Raises:
        ValueError: not every time zone can show it.
    """
    if time.year not in YEARS:
        raise ValueError(f"it is dated to the year {time.year}")
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
