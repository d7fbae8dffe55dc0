"""The record of what a run told its tracker, as plain data, and how a folder becomes metrics. No MLflow in here.

A tracker writes down everything it is told, as a list of events that name files rather than hold them. Sent once, it
is the live MLflow run; kept in `unsynced/` while MLflow does not answer, it is all that `rm-opt store sync` needs.

An artifact folder holds `metrics.jsonl` (metrics by step), `summary.json` (final numbers), `figures/` and `tables/`.
"""

import hashlib
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rmcore.core.errors import DataError
from rmcore.core.files import exclusive, write_text

logger = logging.getLogger(__name__)

Event = dict[str, Any]
MetricRow = tuple[int, dict[str, float]]
"""A step and the values recorded there."""
KEY_TAG = "rm.key"
"""Names the outcome that a run shows: the digest of its artifacts' keys."""
MAX_VALUE_CHARS = 5000
"""MLflow refuses tags over 8,000 and version tags over 5,000 characters."""
SYNC_LOCK, SAVED_LOCK = "unsynced.lock", "unsynced.saved.lock"
"""Held in the home while records are sent, and for the moment in which one is written or removed."""
SHOWN_CHARS = 300
"""Longest text of what is wrong with a record."""
PARTS = ("value", "ci_low", "ci_high", "low_if_no_disaster", "high_if_no_disaster")
"""Parts of a number with ends that become a metric each."""


@dataclass
class RunRecord:
    """One run from its name to its end. `uid` finds it again in MLflow; `events` are in the order they happened.

    `parent_uid` is the uid of the run that this one is a child of; None for a run of its own.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    study: str
    run_name: str
    tags: dict[str, str]
    params: dict[str, str]
    tracking_uri: str
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent_uid: str | None = None
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    events: list[Event] = field(default_factory=list)
    start: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """Names this start of the run: equal runs may begin in one millisecond."""

    @property
    def key(self) -> str | None:
        """The tag `rm.key` that the run has, as far as it was told."""
        told = [event["tags"].get(KEY_TAG) for event in self.events if event["kind"] == "set_tags"]
        return next((key for key in reversed(told) if key is not None), self.tags.get(KEY_TAG))

    def path(self, directory: Path) -> Path:
        """Where the record waits for MLflow, under the home `directory`.

        Each start of a run has one of its own, so that a second start that dies early does not overwrite what the
        first one wrote down.
        """
        uid = hashlib.sha256(self.uid.encode()).hexdigest()
        name = f"{self.run_name[:80]}-{uid[:8]}-{self.start}"
        return unsynced_folder(directory) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.json"

    def save(self, directory: Path) -> Path:
        """Write the record below the home `directory`, whole or not at all, and return its path."""
        path = self.path(directory)
        with exclusive(directory / SAVED_LOCK):
            # Not durable: while MLflow is away it is written after every number.
            write_text(path, json.dumps(asdict(self), indent=1), durable=False)
        return path


def remove_sent(path: Path, record: RunRecord, directory: Path) -> None:
    """Remove the record at `path`, all of which MLflow has, unless its run has written down more meanwhile."""
    with exclusive(directory / SAVED_LOCK):
        if path.exists() and read_record(path) == record:
            path.unlink()


def unsynced_folder(directory: Path) -> Path:
    """Runs of the home `directory` that MLflow has not got yet."""
    return directory / "unsynced"


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Values of tags or parameters as MLflow takes them."""
    return {name: str(value)[:MAX_VALUE_CHARS] for name, value in values.items()}


def plain_table(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as {"columns", "data"}, JSON-ready; None where a row lacks a column or a number is not finite.

    >>> plain_table([{"arm": "adam", "eval": 0.7}, {"arm": "lion"}])
    {'columns': ['arm', 'eval'], 'data': [['adam', 0.7], ['lion', None]]}

    Raises:
        TypeError: a value is neither number, text, boolean nor None.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "data": [[_plain_value(row.get(name), name) for name in columns] for row in rows]}


def _plain_value(value: Any, column: str) -> float | str | bool | None:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(
        f"column {column!r} of the table holds {value!r}, a {type(value).__name__}: tables hold numbers, texts, "
        "booleans and None. Turn it into one of these first."
    )


def read_record(path: Path) -> RunRecord:
    """The record saved at `path`.

    Raises:
        DataError: the file is not a record.
    """
    try:
        return TypeAdapter(RunRecord).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        reason = str(error).replace("\n", " ")[:SHOWN_CHARS]
        raise DataError(
            f"{path} is not a run record ({reason}): it was edited or cut short, so this run cannot be sent to MLflow. "
            "Its metrics are still in the store; remove the file."
        ) from error


def metric_name(stage: str, name: str) -> str:
    """A name that MLflow takes, with exactly one slash (its charts are grouped by what stands before it).

    >>> metric_name("evaluate", "eval/fpr@0.5"), metric_name("evaluate", "num_pairs")
    ('eval/fpr_at_0.5', 'evaluate/num_pairs')
    """
    group, slash, rest = name.partition("/")
    if not slash:
        group, rest = stage, name
    return f"{group}/{re.sub(r'[^A-Za-z0-9_. :-]', '_', rest.replace('@', '_at_'))}"


def parse_metric_lines(lines: Iterable[bytes], *, source: Path) -> list[MetricRow]:
    """Rows of `metrics.jsonl` lines; nulls (numbers that were not finite) are left out.

    A line that is no JSON object of this form was cut short by a killed writer: it is skipped with a warning.
    """
    rows = []
    for line in lines:
        try:
            entry = json.loads(line)
            values = {name: float(value) for name, value in entry["metrics"].items() if value is not None}
            step = int(entry["step"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning(
                "%s has a line that is no metrics record (%s: %r): its writer was probably killed in mid-line. "
                "The line is left out of MLflow; the others are sent.",
                source,
                error,
                line[:80],
            )
            continue
        if values.get("train/lr", 0) > 0:
            # MLflow's chart axes show five decimals, too few for a learning rate.
            values["train/log10_lr"] = math.log10(values["train/lr"])
        rows.append((step, values))
    return rows


def summary_metrics(folder: Path, stage: str) -> dict[str, float]:
    """Final numbers of an artifact folder's `summary.json`, flat.

    Under the key "metrics": a number stays one metric; `{"value", "ci_low", "ci_high"}` becomes three, with the
    suffixes `_ci_low` and `_ci_high`, or, of a gain over few prompts, `_low_if_no_disaster` and
    `_high_if_no_disaster`. Nulls and texts are not metrics and are left out.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / "summary.json"
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} is damaged ({error}), so its numbers cannot be sent to MLflow; run the pipeline again, which "
            "makes the artifact anew."
        ) from error
    metrics: dict[str, float] = {}
    for name, entry in summary.get("metrics", {}).items():
        parts = entry if isinstance(entry, Mapping) else {"value": entry}
        for part in PARTS:
            value, suffix = parts.get(part), "" if part == "value" else f"_{part}"
            if isinstance(value, int | float) and math.isfinite(value):
                metrics[metric_name(stage, name) + suffix] = float(value)
    return metrics


class GrowingFile:
    """Complete lines that a growing file has gained since the last look.

    The file stays open between looks: when its folder is renamed into the store, the last lines are still seen.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._partial = b""

    def new_lines(self) -> list[bytes]:
        """Lines completed since the last call; a last line without its newline waits for the rest."""
        if self._file is None:
            if not self.path.is_file():
                return []
            self._file = self.path.open("rb")
        *lines, self._partial = (self._partial + self._file.read()).split(b"\n")
        return [line for line in lines if line]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
