"""A run as it is to be in MLflow, in plain data: settings, tags, and the artifact folders and files that it names.

`tasks/projection.py` makes MLflow equal to it, as often as it is told to. While a run is not complete in MLflow its
record is in `$RM_OPT_HOME/unsynced/`. No MLflow in here.

A run has hundreds of numbers and over a hundred settings. Those by which runs are compared become metrics and
parameters; all numbers are the run's artifact `numbers.json`, all settings `settings.yaml`.
"""

import hashlib
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rmcore.config.pipeline import GROUPS, PipelineConfig
from rmcore.core.errors import DataError
from rmcore.core.files import write_text
from rmcore.core.metrics import HEADLINE, HEADLINE_FAMILY, WATCHED
from rmcore.core.store import flatten

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
MetricRow = tuple[int, dict[str, float]]
"""A step and the values recorded there."""
KEY_TAG = "rm.key"
"""Names the outcome that a run shows: the digest of its artifacts' keys."""
MAX_VALUE_CHARS = 5000
"""MLflow refuses tags over 8,000 and version tags over 5,000 characters."""
ENDS = (("ci_low", "ci_high", ""), ("low_if_no_disaster", "high_if_no_disaster", " if no prompt is a disaster"))
"""Names of an interval's ends, and under which condition they hold."""
COMPARED = (
    *("seed", "data.source", "model.name", "model.max_seq_len", "train.optimizer", "train.lr", "train.steps"),
    *("train.epochs", "train.pairs_per_step", "train.warmup_steps", "train.weight_decay", "train.label_smoothing"),
)
"""Settings by which runs are compared: each run has them as parameters in MLflow."""


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
    """The process that computes it, by `this_process`; empty: none does any more."""
    settings: dict[str, Any] | None = None
    """All settings, where there are more than the parameters."""
    curves: list[str] = field(default_factory=list)
    """The `metrics.jsonl` of each stage that has begun; it has usually moved into its artifact folder."""
    folders: dict[str, str] = field(default_factory=dict)
    """Artifact folders, with the stage of each: `metrics.jsonl`, `summary.json`, `figures/` and `tables/` are shown."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers of the run as a whole; without those that are not finite. A name without a group is in `summary/`."""
    files: dict[str, str] = field(default_factory=dict)
    """Other files, with the folder of each among the run's artifacts ("" for the top)."""
    note: str | None = None
    """Its description: Markdown by `rmcore.reporting.html.note`, with links to files of the run."""
    experiment_tags: dict[str, str] = field(default_factory=dict)
    study_text: list[str] | None = None
    """A value of the tag `rm.kind`, and what is said of such runs: views of them are saved, and the experiment is
    described with links to these."""
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
        reason = str(error).replace("\n", " ")[:300]
        raise DataError(
            f"{path} is not a run record ({reason}): it was edited, cut short, or "
            "written by another version of this package, so this run cannot be sent to MLflow. "
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
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    values = [[row.get(name) for name in columns] for row in rows]
    finite = [[None if isinstance(one, float) and not math.isfinite(one) else one for one in row] for row in values]
    return {"columns": columns, "data": finite}


def compared_settings(config: PipelineConfig, also: Collection[str] = ()) -> dict[str, Any]:
    """Settings that become parameters in MLflow, by dotted name: those of COMPARED, those in `also` and those that
    differ from the defaults. A group that only has to be there is called "defaults". A mapping is one parameter, as
    JSON: its keys are the user's, and MLflow refuses a run with a parameter's name such as `model/` or `a=b`.
    """
    changed = {
        name: "defaults" if value == {} else value
        for name, value in config.model_dump(mode="json", exclude_defaults=True).items()
        if name != "study"
    }
    shown = {name: value for name, value in flatten(changed, GROUPS).items() if value == "defaults"}
    wanted = {*COMPARED, *also, *flatten(changed, GROUPS)}
    found = {name: one for name, one in flatten(config.model_dump(mode="json"), GROUPS).items() if name in wanted}
    return shown | {name: json.dumps(one) if isinstance(one, dict) else one for name, one in found.items()}


def metric_name(stage: str, name: str) -> str:
    """A name that MLflow takes, with exactly one slash (its charts are grouped by what is before it).

    >>> metric_name("evaluate", "eval/fpr@0.5"), metric_name("evaluate", "num_pairs")
    ('eval/fpr_at_0.5', 'evaluate/num_pairs')
    """
    group, slash, rest = name.partition("/")
    if not slash:
        group, rest = stage, name
    return f"{group}/{re.sub(r'[^A-Za-z0-9_. :-]', '_', rest.replace('@', '_at_'))}"


def parse_metric_lines(lines: Iterable[bytes], *, source: Path) -> list[MetricRow]:
    """Rows of `metrics.jsonl` lines, of the curves that are watched; nulls (numbers that were not finite) are left out.

    A line that is no JSON object of this form was cut short by a killed writer: it is skipped with a warning.
    """
    rows = list[MetricRow]()
    for line in lines:
        try:
            entry = json.loads(line)
            values = {name: float(value) for name, value in entry["metrics"].items() if value is not None}
            rows.append((int(entry["step"]), {name: one for name, one in values.items() if WATCHED.fullmatch(name)}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning(
                "%s has a line that is no metrics record (%s: %r): its writer was probably killed in mid-line. "
                "The line is left out of MLflow; the others are sent.",
                *(source, error, line[:80]),
            )
    return rows


def read_numbers(folder: Path, stage: str) -> list[dict[str, Any]]:
    """Final numbers of an artifact folder's `summary.json`, a row each: stage, metric, value and, of those that have
    them, the ends of an interval and what else is known. Nulls and texts are left out.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / "summary.json"
    if not path.is_file():
        return []
    try:
        told = json.loads(path.read_text(encoding="utf-8")).get("metrics", {})
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged ({error}), so its numbers cannot be sent to MLflow; run the pipeline again, which "
            "computes the artifact again."
        ) from error
    rows = list[dict[str, Any]]()
    for name, entry in told.items():
        parts = entry if isinstance(entry, dict) else {"value": entry}
        known = {part: one for part, one in parts.items() if isinstance(one, int | float | str | None)}
        rows.append({"stage": stage, "metric": metric_name(stage, name), **known})
    return [row for row in rows if isinstance(row.get("value"), int | float) and math.isfinite(row["value"])]


def headline(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """The rows of `read_numbers` that become metrics in MLflow, and tags that say their intervals.

    Those of some stages are all told, such as a benchmark's, one for each of its sets.
    """
    from rmcore.stages.stages import STAGES  # here: it imports readers of data

    whole = {name for name, stage in STAGES.items() if stage.in_mlflow}
    chosen = [
        row
        for row in rows
        if row["metric"] in HEADLINE or row["metric"].startswith(HEADLINE_FAMILY) or row["stage"] in whole
    ]
    return {row["metric"]: float(row["value"]) for row in chosen}, interval_tags({row["metric"]: row for row in chosen})


def interval_tag(metric: str) -> str:
    """Name of the tag that says the interval of a metric.

    >>> interval_tag("eval/test_loss")
    'interval/test_loss'
    """
    return f"interval/{metric.partition('/')[2]}"


def interval_tags(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Tags that say the intervals of numbers, by metric, in words; a number without one has no tag.

    >>> interval_tags({"eval/test_loss": {"value": 0.7, "ci_low": 0.61239, "ci_high": 0.75}, "cost/x": {"value": 1.0}})
    {'interval/test_loss': '0.6124 to 0.75'}
    """
    found = {}
    for metric, entry in numbers.items():
        for low, high, condition in ENDS:
            if isinstance(entry.get(low), int | float) and isinstance(entry.get(high), int | float):
                found[interval_tag(metric)] = f"{entry[low]:.4g} to {entry[high]:.4g}{condition}"
    return found
