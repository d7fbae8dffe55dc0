"""The runs of a home, read from the records next to the reports without any server, and the page that lists them."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

from pydantic import BaseModel, Field, ValidationError

from rmcore.core.errors import ConfigError
from rmcore.core.files import exclusive, write_text
from rmcore.reporting.figures import numbers
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
OWNER_ONLY = 0o600


class _Verdict(BaseModel):
    status: str = ""
    headline: str = ""
    rung: Annotated[int, Field(ge=1, le=4)] | None = None


class _Accuracy(BaseModel):
    value: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None


class _Metrics(BaseModel):
    pairwise_accuracy: _Accuracy | None = None


class _Claim(BaseModel):
    verdict: str


class _Stage(BaseModel):
    name: str | None = None
    key: str | None = None
    device_seconds: float | None = None


class _Cost(BaseModel):
    device_seconds: float | None = None


class _Record(BaseModel):
    """The fields that are shown of a run, or read to find it; a record may hold anything else."""

    created: str | None = None
    verdict: _Verdict | str | None = None
    headline: str | None = None
    hypotheses: list[_Claim] | None = None
    metrics: _Metrics | list[Any] | None = None
    stages: list[_Stage] | None = None
    cost: _Cost | None = None
    config: dict[str, Any] = {}


class _Read(NamedTuple):
    """The fields of a record that are shown, or why it cannot be read."""

    finished: datetime
    record: _Record = _Record()
    problem: str | None = None


@dataclass(frozen=True)
class Run:
    """One finished run: of the pipeline, of an experiment, or of a flow about a policy.

    Its record is read when a part of it is first used.
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
        return self._read.record.config

    @property
    def stage_keys(self) -> Mapping[str, str]:
        """The keys of its stages' artifacts by name."""
        return {stage.name: stage.key for stage in self._read.record.stages or [] if stage.name and stage.key}

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """The whole record; empty where it cannot be read."""
        whole: Mapping[str, Any] = {} if self.problem else json.loads((self.folder / RECORD).read_bytes())
        return whole

    @property
    def name(self) -> str:
        """Name on the command line: its folder's."""
        return self.folder.name

    @property
    def key(self) -> str:
        """First digits of the key of all that it computed; empty where its folder's name has none."""
        match = KEY.search(self.name)
        return "" if match is None else match.group()[1:]

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
        record = self._read.record
        if self.problem is not None:
            return f"its record cannot be read: {self.problem}"
        if self._verdict is not None:
            return self._verdict.headline
        if record.hypotheses is not None:
            return self._tally
        return str(record.verdict or record.headline or "no verdict: it measured, and judged nothing")

    @property
    def rung(self) -> str:
        """Evidence level of its verdict: "1 of 4", or empty."""
        return f"{self._verdict.rung} of 4" if self._verdict is not None and self._verdict.rung else ""

    @property
    def status(self) -> str:
        """The verdict in a word or two: "not ready", or empty."""
        if self._verdict is not None:
            return self._verdict.status.replace("_", " ")
        return self._tally if self._read.record.hypotheses else ""

    @property
    def accuracy(self) -> Mapping[str, float | None] | None:
        """Held-out pairwise accuracy with its 95 % interval, None where it was not measured."""
        metrics = self._read.record.metrics
        accuracy = metrics.pairwise_accuracy if isinstance(metrics, _Metrics) else None
        return None if accuracy is None else accuracy.model_dump()

    @property
    def device_seconds(self) -> float | None:
        """Seconds that its stages held the device when they were computed, cached ones too; None: unknown."""
        record = self._read.record
        if record.cost is not None and record.stages is None:
            return record.cost.device_seconds
        known = [stage.device_seconds for stage in record.stages or [] if stage.device_seconds is not None]
        return sum(known) if known else None

    @property
    def _verdict(self) -> _Verdict | None:
        return self._read.record.verdict if isinstance(self._read.record.verdict, _Verdict) else None

    @property
    def _tally(self) -> str:
        return tally([claim.model_dump() for claim in self._read.record.hypotheses or []])


def read_runs(reports: Path) -> list[Run]:
    """All finished runs below the folder of reports, the newest first; none where there is no such folder.

    A record that is damaged is a run, too: its `problem` says why it cannot be read.
    """
    return _newest_first(list_runs(reports))


def list_runs(reports: Path) -> list[Run]:
    """The runs of `read_runs` in no order, of which no record was read yet: to find one by its name."""
    return [Run(record.parent) for record in reports.glob(f"*/{RECORD}")]


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
        finished = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        # Settings may name a path that is not UTF-8, which pydantic's own parser refuses; what is shown may not.
        record = _Record.model_validate(json.loads(file.read_bytes()))
        record.model_dump_json(exclude={"config"})
        if record.created is not None:
            finished = datetime.fromisoformat(record.created).astimezone(UTC)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        field = ".".join(part for part in map(str, first["loc"]) if not part.startswith("_"))
        return _Read(finished, problem=f"{field or RECORD} is not as a run writes it: {first['msg']}")
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        return _Read(finished, problem=str(error))
    return _Read(finished, record)


def write_index(reports: Path) -> list[Run]:
    """Rewrite the page of all finished runs below the folder `reports`; gives them, the newest first.

    Only its owner can read it, as all files there. Two runs that end at once take turns.
    """
    from rmcore.reporting.html.page import date, render_page  # here: jinja2, which few commands need

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
        "finished": run.finished.strftime("%Y-%m-%d %H:%M"),
        "style": run.style,
        "judged": bool(run.status),
        "headline": run.headline,
        "rung": run.rung,
        "accuracy": accuracy,
        "interval": interval,
        "device_time": numbers.duration(run.device_seconds),
    }
