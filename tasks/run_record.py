"""The record of what a run told its tracker, as plain data. No MLflow in here.

A tracker writes down everything it is told, as a list of events that name files rather than hold them. Sent once, it
is the live MLflow run; kept in `unsynced/` while MLflow does not answer, it is all that `rm-opt store sync` needs.

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
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rmcore.core.errors import DataError
from rmcore.core.files import write_text

Event = dict[str, Any]
KEY_TAG = "rm.key"
"""Names the outcome that a run shows: the digest of its artifacts' keys."""
MAX_VALUE_CHARS = 5000
"""MLflow refuses tags over 8,000 and version tags over 5,000 characters."""
SYNC_LOCK = "unsynced.lock"
"""Held in the home while records are sent."""
SHOWN_CHARS = 300
"""Longest text of what is wrong with a record."""


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
    owner: dict[str, str] = field(default_factory=dict)
    """The process that writes it, by `run_owner.this_process`; empty: none does any more."""

    @property
    def key(self) -> str | None:
        """The tag `rm.key` that the run has, as far as it was told."""
        told = [event["tags"].get(KEY_TAG) for event in self.events if event["kind"] == "set_tags"]
        return next((key for key in reversed(told) if key is not None), self.tags.get(KEY_TAG))

    def path(self, directory: Path) -> Path:
        """Where the record waits for MLflow, under the home `directory`; each start of a run has a file of its own."""
        uid = hashlib.sha256(self.uid.encode()).hexdigest()
        name = f"{self.run_name[:80]}-{uid[:8]}-{self.start}"
        return unsynced_folder(directory) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.json"

    def save(self, directory: Path) -> Path:
        """Write the record below the home `directory`, whole or not at all, and return its path."""
        path = self.path(directory)
        # Not durable: while MLflow is away it is written after every number.
        write_text(path, json.dumps(asdict(self), indent=1), durable=False)
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
