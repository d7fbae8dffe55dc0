"""The runs of a home, read from the records next to the reports: no server and no database is needed."""

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rmcore.core.errors import ConfigError
from rmcore.reporting.figures.claims import tally
from rmcore.reporting.verdict_style import VERDICT_STYLES, VerdictStyle

RECORD = "summary.json"
REPORT = "report.html"
INDEX = "index.html"
"""The page of all reports, in the folder of reports."""
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
    """A part of a record: what is said here of a field is checked and kept, other fields may be anything."""

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
    environment: _Part = _Part()


class _Read(NamedTuple):
    """The fields of a record that are shown, or why it cannot be read."""

    finished: datetime
    found: _Record = _Record()
    problem: str | None = None


@dataclass(frozen=True)
class Run:
    """One finished run: of the pipeline, of an experiment, or of a flow about a policy.

    Its record is read when something of it is asked for.
    """

    folder: Path
    """Holds its record and, mostly, its report."""

    @cached_property
    def _read(self) -> _Read:
        return _read(self.folder / RECORD)

    @property
    def finished(self) -> datetime:
        """When it ended."""
        return self._read.finished

    @property
    def problem(self) -> str | None:
        """Why its record cannot be read."""
        return self._read.problem

    @property
    def config(self) -> Mapping[str, Any]:
        """Its settings; empty where it has none."""
        return self._read.found.config

    @property
    def stage_keys(self) -> Mapping[str, str]:
        """The keys of its stages' artifacts by name."""
        return {stage.name: stage.key for stage in self._read.found.stages if stage.name and stage.key}

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """Everything that was found, read when it is first asked for; empty where the file cannot be read.

        Raises:
            ConfigError: a part of it that a list of runs does not show is damaged.
        """
        if self.problem is not None:
            return {}
        try:
            return _whole_record(self.folder / RECORD)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self.folder / RECORD} cannot be read ({error}): restore it, or run again.") from error

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
        return OPEN if self._verdict is None else VERDICT_STYLES.get(self._verdict.status, OPEN)

    @property
    def headline(self) -> str:
        """Its outcome in one sentence."""
        found = self._read.found
        if self.problem is not None:
            return f"its record cannot be read: {self.problem}"
        if self._verdict is not None:
            return self._verdict.headline
        if "hypotheses" in found.model_fields_set:
            return self._tally
        return str(found.verdict or found.headline or "no verdict: it measured, and judged nothing")

    @property
    def rung(self) -> str:
        """Evidence level of its verdict: "1 of 4", or empty."""
        rung = None if self._verdict is None else self._verdict.rung
        return "" if rung is None else f"{rung} of 4"

    @property
    def status(self) -> str:
        """The verdict in a word or two: "not ready", or empty."""
        if self._verdict is not None:
            return self._verdict.status.replace("_", " ")
        return self._tally if self._read.found.hypotheses else ""

    @property
    def accuracy(self) -> Mapping[str, float | None] | None:
        """Held-out pairwise accuracy with its 95 % interval, None where it was not measured."""
        metrics = self._read.found.metrics
        found = metrics.pairwise_accuracy if isinstance(metrics, _Metrics) else None
        return (
            None if found is None or len(found.model_fields_set) < len(_Accuracy.model_fields) else found.model_dump()
        )

    @property
    def device_seconds(self) -> float | None:
        """Seconds that its stages held the device when they were computed, cached ones too; None: unknown."""
        found = self._read.found
        if "cost" in found.model_fields_set and "stages" not in found.model_fields_set:
            return None if found.cost is None else found.cost.device_seconds
        known = [float(stage.device_seconds) for stage in found.stages if stage.device_seconds is not None]
        return sum(known) if known else None

    @property
    def _verdict(self) -> _Verdict | None:
        return self._read.found.verdict if isinstance(self._read.found.verdict, _Verdict) else None

    @property
    def _tally(self) -> str:
        return tally([claim.model_dump() for claim in self._read.found.hypotheses])


def read_runs(reports: Path) -> list[Run]:
    """All finished runs below the folder of reports, the newest first; none where there is no such folder.

    A record that is damaged is a run, too: its `problem` says why it cannot be read.
    """
    return _newest_first(list_runs(reports))


def list_runs(reports: Path) -> list[Run]:
    """The runs of `read_runs` in no order, of which no record was read yet: to find one by its name."""
    if not reports.is_dir():
        return []
    # Not by `glob`, which passes over a link that leads nowhere.
    return [Run(folder) for folder in reports.iterdir() if os.path.lexists(folder / RECORD)]


def _newest_first(runs: Iterable[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run.finished, run.name), reverse=True)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """How far each name has to be written: to the fourth digit of its key, further where another name begins so."""
    ordered = sorted(set(names))
    shared = [0, *map(_num_alike, pairwise(ordered)), 0]  # with the name before, and after
    short = {}
    for name, alike in zip(ordered, map(max, pairwise(shared)), strict=True):
        keyed = KEY.search(name)
        length = len(name) if keyed is None else keyed.start() + 1 + KEY_DIGITS
        short[name] = name[: max(length, alike + 1)]
    return short


def _num_alike(names: Sequence[str]) -> int:
    return len(os.path.commonprefix(names))  # noqa: RUF071 - characters, not parts of a path


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
    return ", ".join(run.name for run in _newest_first(runs)[:most]) + more


def _read(file: Path) -> _Read:
    finished = datetime.fromtimestamp(0, UTC)
    try:
        state = file.lstat()
        finished = _moment(datetime.fromtimestamp(state.st_mtime, UTC))
        if not stat.S_ISREG(state.st_mode):
            raise ValueError(f"{RECORD} is no file of its own, but a folder, a link or a device")
        if state.st_size > MOST_BYTES:
            raise ValueError(f"{RECORD} has {state.st_size} bytes, and no record of a run has more than {MOST_BYTES}")
        found = _checked(file)
        if found.created is not None:
            finished = _moment(datetime.fromisoformat(found.created))
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        place = ".".join(part for part in map(str, first["loc"]) if not part.startswith("_"))
        return _Read(finished, problem=f"{place} is not as a run writes it: {first['msg']}")
    except RecursionError:
        return _Read(finished, problem="it is nested too deeply")
    except (OSError, ValueError, TypeError, OverflowError) as error:
        return _Read(finished, problem=str(error))
    return _Read(finished, found)


def _checked(file: Path) -> _Record:
    """The fields of a record that are shown; nothing else of it is made an object of Python."""
    try:
        return _Record.model_validate_json(file.read_bytes())
    except ValidationError:  # or JSON that only the standard library reads: half characters
        return _Record.model_validate(_whole_record(file))


def _whole_record(file: Path) -> dict[str, Any]:
    record = json.loads(file.read_bytes())
    if not isinstance(record, dict):
        raise TypeError(f"it holds a {type(record).__name__}, not what a run found")
    return record


def _moment(time: datetime) -> datetime:
    """The moment in UTC, which a record without a zone means.

    Raises:
        ValueError: not every time zone can show it.
    """
    if time.year not in YEARS:
        raise ValueError(f"it is dated to the year {time.year}")
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
