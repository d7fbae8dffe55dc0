"""A run as it is to be in MLflow, in plain data: settings, tags, and the artifact folders and files that it names.

`tasks/projection.py` makes MLflow equal to it, and may do so as often as it is asked to. While a run is not complete in
MLflow its record is in `$RM_OPT_HOME/unsynced/`. No MLflow in here.

An artifact folder holds `metrics.jsonl` (metrics by step), `summary.json` (final numbers), `figures/` and `tables/`.
"""

import hashlib
import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rmcore.core.errors import DataError
from rmcore.core.files import write_text

Status = Literal["FINISHED", "FAILED", "KILLED"]
KEY_TAG = "rm.key"
"""Names the outcome that a run shows: the digest of its artifacts' keys."""
MAX_VALUE_CHARS = 5000
"""MLflow refuses tags over 8,000 and version tags over 5,000 characters."""
SHOWN_CHARS = 300
"""Longest text of what is wrong with a record."""


@dataclass(frozen=True)
class RunRecord:
    """One run. `uid` finds it again in MLflow, `start` names one start of it: equal runs may begin in a millisecond."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    study: str
    run_name: str
    tags: dict[str, str]
    params: dict[str, str]
    tracking_uri: str
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent_uid: str | None = None
    """The uid of the run that this one is a child of."""
    start: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    owner: dict[str, str] = field(default_factory=dict)
    """The process that computes it, by `run_owner.this_process`; empty: none does any more."""
    settings: dict[str, Any] | None = None
    """All settings, where there are more than the parameters."""
    curves: list[str] = field(default_factory=list)
    """The `metrics.jsonl` of each stage that has begun; it has usually moved into its artifact folder."""
    folders: dict[str, str] = field(default_factory=dict)
    """Artifact folders, with the stage of each."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers of the run as a whole; without those that are not finite. A name without a group is in `summary/`."""
    files: dict[str, str] = field(default_factory=dict)
    """Other files, with the folder of each among the run's artifacts ("" for the top)."""
    tables: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """By name, as `plain_table` gives them; each is the artifact `<name>.json`, in the form of `mlflow.log_table`."""
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Its inputs by fingerprint: name, source, num_rows."""
    note: str | None = None
    """Its description: Markdown by `rmcore.reporting.html.note`, with links to files of the run."""
    experiment_tags: dict[str, str] = field(default_factory=dict)
    study_text: list[str] | None = None
    """A value of the tag `rm.kind`, and what is said of such runs: views of them are saved, and the experiment is
    described with links to these."""
    view_key: str | None = None
    """Names the view of the experiment, among its tags, that compares the run's children."""
    is_watched: bool = False
    """Whether to send how busy this machine is, every 10 seconds from the run's first number to its end."""
    model: dict[str, Any] | None = None
    """Registered checkpoint, by the arguments of `model_versions.register_checkpoint`."""
    confirmation: dict[str, Any] | None = None
    """The key of a training, and the tags that say what serving its model has shown."""
    status: Status | None = None
    """None: it has not ended."""
    ended_ms: int | None = None

    def path(self, directory: Path) -> Path:
        """Where the record waits for MLflow, under the home `directory`; each start of a run has a file of its own."""
        uid = hashlib.sha256(self.uid.encode()).hexdigest()
        name = f"{self.study[:80]}-{uid[:8]}-{self.start}"
        return unsynced_folder(directory) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.json"

    def save(self, directory: Path) -> Path:
        """Write the record below the home `directory`, whole or not at all, and return its path."""
        path = self.path(directory)
        write_text(path, json.dumps(asdict(self), indent=1), durable=False)  # it is written after each change
        return path


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


def unsynced_folder(directory: Path) -> Path:
    """Runs of the home `directory` that are not complete in MLflow."""
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
    for name, value in ((name, value) for row in rows for name, value in row.items()):
        if not isinstance(value, str | int | float | None):
            raise TypeError(
                f"column {name!r} of the table holds {value!r}, a {type(value).__name__}: tables hold numbers, texts, "
                "booleans and None. Turn it into one of these first."
            )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    values = [[row.get(name) for name in columns] for row in rows]
    finite = [[None if isinstance(one, float) and not math.isfinite(one) else one for one in row] for row in values]
    return {"columns": columns, "data": finite}
