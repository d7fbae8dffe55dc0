"""One MLflow run, fed with events. MLflow is used here and in the modules that this one imports, nowhere else.

Everything goes through `MlflowClient` with an explicit run id, never through MLflow's global "active run".
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.core.files import exclusive
from rmcore.core.tracking import METRICS_FILE
from rmcore.reporting.html.note import in_run
from tasks.mlflow_client import connect, tolerating
from tasks.model_training import EXPERIMENT_TAGS
from tasks.model_versions import VersionJudgement, confirm_versions, register_checkpoint
from tasks.run_identity import (
    EXPERIMENT_PREFIX,
    MISSING_TAG,
    adopt_children,
    contradicts,
    find_run,
    identity_tags,
    is_complete,
    join_parent,
    make_run,
    owner_tags,
    set_aside,
)
from tasks.run_record import (
    MAX_VALUE_CHARS,
    Event,
    MetricRow,
    RunRecord,
    parse_metric_lines,
    summary_metrics,
    texts,
)

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

logger = logging.getLogger(__name__)

MAX_METRICS_PER_CALL = 1000
MAX_PARAMS_PER_CALL = 100
"""MLflow's own limits of one log_batch call."""
LOGGED_ARTIFACTS_TAG = "mlflow.loggedArtifacts"
"""Where MLflow's evaluation view looks for tables: a JSON list of {"path", "type": "table"}."""
NOTE_TAG = "mlflow.note.content"
"""Tag of the description that MLflow shows on a run's page."""
TAKEN_WHEN_COMPLETE = ("set_tags", "experiment_tags", "note", "model", "confirmation")
"""Events that a complete run still takes; each leaves MLflow as it is when it is told again."""


class MlflowRun:
    """One MLflow run: applies events to it, and raises what MLflow raises. Used by one thread."""

    def __init__(self, record: RunRecord, directory: Path, tracking_uri: str, *, resume: bool) -> None:
        """Open the run of `record`.

        Args:
            record: what the run is.
            directory: the home, for locks and the artifacts of a bare database.
            tracking_uri: MLflow's address.
            resume: look for a run of this uid first.
        """
        self.client = connect(tracking_uri)
        self.directory = directory
        self.record = record
        self.experiment_id = self._experiment(record.study, tracking_uri)
        self.missing: list[str] = []
        self._run, self._resumed = self._find_or_make(record) if resume else (self._make(record), False)
        self.run_id: str = self._run.info.run_id
        self.complete = self._resumed and is_complete(self._run, record)
        self._sent_lines: set[bytes] = set()
        self._known: dict[str, set[tuple[float, int]]] = {}
        self._summary: dict[tuple[str, int], float] = {}
        self._next_step = 0
        self._tracking_uri = tracking_uri
        self._monitor: SystemMetricsMonitor | None = None
        self._begin()

    def _find_or_make(self, record: RunRecord) -> "tuple[Run, bool]":
        # Two processes that start the same run at once must make one.
        with exclusive(self.directory / "mlflow" / "take-up.lock"):
            found = find_run(self.client, self.experiment_id, record.uid)
            if found is None:
                return self._make(record), False
            if contradicts(found, record):
                set_aside(self.client, found)
                return self._make(record), False
            return found, True

    def _make(self, record: RunRecord) -> "Run":
        return make_run(self.client, self.experiment_id, record)

    def _begin(self) -> None:
        known = self._run.data if self._resumed else None
        tags = identity_tags(self.record) if known else {}
        self.set_tags({name: text for name, text in tags.items() if known and known.tags.get(name) != text})
        if not self.complete:
            if self._resumed:
                self.set_tags(owner_tags())
            if self._run.info.status != "RUNNING":
                self.client.update_run(self.run_id, "RUNNING")
            self._send_params(
                {name: text for name, text in self.record.params.items() if not known or name not in known.params}
            )
        self._has_parent = self.record.parent_uid is None or self._join_parent(self.record.parent_uid)
        if not self._resumed:
            adopt_children(self.client, self._run, self.record.uid)

    def _experiment(self, study: str, tracking_uri: str) -> str:
        """Id of the experiment `rm/<study>`, made where missing and restored where deleted."""
        name = f"{EXPERIMENT_PREFIX}{study}"
        # A server knows its own artifact root; MLflow's default for a bare database is the current folder.
        artifacts = self.directory / "mlflow" / "artifacts" / study
        location = None if tracking_uri.startswith("http") else artifacts.as_uri()
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            with tolerating("RESOURCE_ALREADY_EXISTS"):  # another run may be faster
                return str(self.client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))
            return self._experiment(study, tracking_uri)
        if experiment.lifecycle_stage == "deleted":
            self.client.restore_experiment(experiment.experiment_id)
        for tag, value in EXPERIMENT_TAGS.items():  # one that an older version made, or a person, may lack it
            if experiment.tags.get(tag) != value:
                self.client.set_experiment_tag(experiment.experiment_id, tag, value)
        return str(experiment.experiment_id)

    def _send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        entities = [Param(name, value) for name, value in params.items()]
        for start in range(0, len(entities), MAX_PARAMS_PER_CALL):
            self.client.log_batch(self.run_id, params=entities[start : start + MAX_PARAMS_PER_CALL])

    def apply(self, event: Event) -> Any:
        """Do what `event` says; its "kind" names the method. A complete run takes no more numbers and files."""
        if self.complete and event["kind"] not in TAKEN_WHEN_COMPLETE:
            return None
        details = {name: value for name, value in event.items() if name != "kind"}
        return getattr(self, event["kind"])(**details)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        from mlflow.entities import RunTag

        if tags:
            self.client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def experiment_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the whole experiment."""
        for name, value in tags.items():
            self.client.set_experiment_tag(self.experiment_id, name, value)

    def dataset(self, name: str, fingerprint: str, source: str, num_rows: int) -> None:
        """Name a data set as the run's input; MLflow keeps one per name and digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        entity = Dataset(
            name=name,
            digest=fingerprint[:36],  # MLflow's limit
            source_type="local",
            source=json.dumps({"uri": source}),
            profile=json.dumps({"num_rows": num_rows, "fingerprint": fingerprint}),
        )
        self.client.log_inputs(self.run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", "training")])])

    def file(self, path: str, folder: str) -> None:
        """Copy a file into the run's artifacts."""
        self.client.log_artifact(self.run_id, path, folder or None)

    def follow(self, path: str) -> None:
        """Replay of a followed file: whatever of it was not sent line by line."""
        if Path(path).is_file():
            self.send_lines(Path(path).read_bytes().splitlines(), Path(path))

    def folder(self, path: str, stage: str) -> None:
        """Send the curves, final numbers, figures and tables of a stage's artifact."""
        artifact = Path(path)
        self.follow(str(artifact / METRICS_FILE))
        # One step after the curves: MLflow shows the value of the last step as a run's metric.
        self.send_metrics([(self._next_step, summary_metrics(artifact, stage))])
        for part in ("figures", "tables"):
            if (artifact / part).is_dir():
                self.client.log_artifacts(self.run_id, str(artifact / part), f"{stage}/{part}")

    def send_lines(self, lines: Sequence[bytes], source: Path) -> None:
        """Send lines of a metrics file, each at most once in a run, wherever the file has been moved to meanwhile."""
        new = [line for line in dict.fromkeys(lines) if line not in self._sent_lines]
        rows = parse_metric_lines(new, source=source)
        self._next_step = max([self._next_step, *(step + 1 for step, _ in rows)])
        self.send_metrics(rows)
        self._sent_lines.update(new)

    def send_metrics(self, rows: Sequence[MetricRow]) -> None:
        """Send rows in as few calls as MLflow allows; into a resumed run, only what it has not got."""
        now_ms = time.time_ns() // 1_000_000
        points = [(name, value, step) for step, values in rows for name, value in values.items()]
        if self._resumed:
            points = [point for point in points if point[1:] not in self._points_of(point[0])]
            for name, value, step in points:
                self._known[name].add((value, step))
        self._send_points(points, now_ms)

    def _points_of(self, name: str) -> set[tuple[float, int]]:
        """Values and steps of a metric that the resumed run has."""
        if name not in self._known:
            self._known[name] = {(point.value, point.step) for point in self._history(name)}
        return self._known[name]

    def _history(self, name: str) -> "list[Metric]":
        return sorted(self.client.get_metric_history(self.run_id, name), key=lambda point: point.timestamp)

    def metrics(self, values: Mapping[str, float], step: int, time_ms: int) -> None:
        """Set numbers of the run as a whole; of several told at one step, the last one holds."""
        if self._resumed:
            for name in values:
                if (name, step) not in self._summary:
                    self._summary |= {(name, point.step): point.value for point in self._history(name)}
        new = [(name, value, step) for name, value in values.items() if self._summary.get((name, step)) != value]
        self._send_points(new, time_ms)
        self._summary |= {(name, step): value for name, value, step in new}

    def _send_points(self, points: Sequence[tuple[str, float, int]], time_ms: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, time_ms, step) for name, value, step in points]
        for start in range(0, len(metrics), MAX_METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MAX_METRICS_PER_CALL])

    def table(self, name: str, columns: Sequence[str], data: Sequence[Sequence[Any]]) -> None:
        """Write a table (over an earlier one of this name) and list it for MLflow's evaluation view."""
        path = f"{name}.json"
        self.client.log_dict(self.run_id, {"columns": columns, "data": data}, path)
        listed = json.loads(self.client.get_run(self.run_id).data.tags.get(LOGGED_ARTIFACTS_TAG, "[]"))
        entry = {"path": path, "type": "table"}
        if entry not in listed:
            self.set_tags({LOGGED_ARTIFACTS_TAG: json.dumps([*listed, entry])})

    def watch_machine(self) -> None:
        """Send numbers of the machine as `system/…`, which MLflow shows on a page of their own, until the end."""
        if self.complete or self._monitor is not None:
            return
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # Its thread ends at the first failure; an outage is told once, by the tracker.
        logging.getLogger(SystemMetricsMonitor.__module__).setLevel(logging.CRITICAL)
        self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=self._resumed, tracking_uri=self._tracking_uri)
        self._monitor.start()

    def end(self, status: str, ended_ms: int) -> None:
        """Set the run's final status and end time, after all else: whoever reads FINISHED takes the run for whole."""
        if self._monitor is not None:
            self._monitor.finish()
        if not self._has_parent and not self._join_parent(str(self.record.parent_uid)):
            logger.warning(
                "MLflow does not know the parent of run %s: its matrix was never sent there, so the run stands alone "
                "until the parent is sent (`rm-opt sync`, or the same command again).",
                self.record.run_name,
            )
        if self.missing:
            self.set_tags(texts({MISSING_TAG: "; ".join(self.missing)}))
        elif self._resumed and MISSING_TAG in self._run.data.tags:
            self.client.delete_tag(self.run_id, MISSING_TAG)
        self.client.set_terminated(self.run_id, status, ended_ms)

    def _join_parent(self, parent_uid: str) -> bool:
        return join_parent(self.client, self._run, parent_uid)

    def note(self, text: str) -> None:
        """Set the run's description."""
        self.set_tags({NOTE_TAG: self._linked(text)})

    def _linked(self, note: str) -> str:
        return in_run(note, f"#/experiments/{self.experiment_id}/runs/{self.run_id}/artifacts")[:MAX_VALUE_CHARS]

    def model(
        self, checkpoint: str, name: str, key: str, tags: Mapping[str, str], moves: Mapping[str, bool], note: str
    ) -> str:
        """Register a checkpoint once per key, set its tags and aliases, link it to this run; return its version."""
        from mlflow.entities import LoggedModelOutput

        judgement = VersionJudgement(tags, moves, self._linked(note))
        with exclusive(self.directory / "mlflow" / "register.lock"):
            version = register_checkpoint(self.client, self._run, Path(checkpoint), name, key, judgement)
        model_id = version.tags["rm.model_id"]
        outputs = self.client.get_run(self.run_id).outputs
        if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(model_id, step=0)])
        self.set_tags({"rm.model": f"models:/{name}/{version.version}"})
        return str(version.version)

    def confirmation(self, key: str, tags: Mapping[str, str]) -> None:
        """Tell the versions of a training what serving them has shown."""
        with exclusive(self.directory / "mlflow" / "register.lock"):
            found = confirm_versions(self.client, key, tags)
        if found:
            self.set_tags({"rm.model": found[-1]})
