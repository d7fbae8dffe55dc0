"""One MLflow run, fed with events. MLflow is used here and in the modules that this one imports, nowhere else.

Everything goes through `MlflowClient` with an explicit run id, never through MLflow's global "active run".

A run has a uid. Started again, one that MLflow has whole is used again and gets nothing but tags. Otherwise a new one
is made: two attempts never mix in one run's curves, and sending a record twice does no harm. Earlier ones with this uid
are deleted, which MLflow can undo: what failed or was cut off at once, a FINISHED one only when a whole one is there,
and what a living process of this machine feeds not at all. A child looks for its parent by uid when it begins, and a
parent for its children when it ends, so either may come first.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.core.files import exclusive
from rmcore.core.tracking import METRICS_FILE
from rmcore.reporting.html.note import experiment_note, in_run
from rmcore.reporting.runs import KEY_DIGITS
from tasks.comparison_view import comparison_url, study_view, told_apart, view_tags
from tasks.headline import MetricRow, headline, parse_metric_lines, read_numbers
from tasks.mlflow_client import connect, in_one_line, is_outage, tolerating
from tasks.model_training import EXPERIMENT_TAGS
from tasks.model_versions import VersionJudgement, confirm_versions, register_checkpoint
from tasks.run_owner import HOST, OWNER_FIELDS, has_died, this_machine, this_process
from tasks.run_record import KEY_TAG, MAX_VALUE_CHARS, Event, RunRecord, plain_table, texts

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

logger = logging.getLogger(__name__)

MAX_METRICS_PER_CALL, MAX_PARAMS_PER_CALL = 1000, 100
"""MLflow's own limits of one log_batch call."""
LOGGED_ARTIFACTS_TAG = "mlflow.loggedArtifacts"
"""Where MLflow's evaluation view looks for tables: a JSON list of {"path", "type": "table"}."""
NOTE_TAG = "mlflow.note.content"
"""Tag of the description that MLflow shows on a run's page."""
PARENT_TAG = "mlflow.parentRunId"
UID_TAG, PARENT_UID_TAG, KIND_TAG = "rm.run_uid", "rm.parent_uid", "rm.kind"
START_TAG = "rm.start"
"""Names the start of the run that MLflow was told of last."""
MISSING_TAG = "rm.missing_files"
"""Names what the run was sent without: such a run is not whole."""
OWNER_PREFIX = "rm."
"""Prefix of the tags that name the process which feeds a run."""
EXPERIMENT_PREFIX = "rm/"
"""Prefix of the names of all our experiments."""
FINISHED = "FINISHED"
TAKEN_WHEN_COMPLETE = ("set_tags", "experiment_tags", "study", "note", "model", "confirmation")
"""Events that a complete run still takes; each leaves MLflow as it is when it is told again."""


def replay(record: RunRecord, directory: Path) -> "MlflowRun":
    """Send all of a record to MLflow; what is gone from the disk, or refused, is named and left out.

    Raises what MLflow raises where it does not answer.
    """
    run = MlflowRun(record, directory)
    for event in record.events:
        needed = event.get("path") or event.get("checkpoint")
        try:
            if run.complete or needed is None or Path(needed).exists():
                run.apply(event)
                continue
            reason = f"{needed} is gone"
        except Exception as error:
            if is_outage(error):
                raise
            reason = in_one_line(error)
        if event["kind"] != "follow":  # a followed file has usually moved into its artifact folder
            run.missing.append(reason)
            logger.warning("%s, so run %s goes to MLflow without it; run the same again.", reason, record.run_name)
    return run


class MlflowRun:
    """One MLflow run: applies events to it, and raises what MLflow raises. Used by one thread."""

    def __init__(self, record: RunRecord, directory: Path) -> None:
        """Open the run of `record`; `directory` is the home, for locks and the artifacts of a bare database."""
        self.client = connect(record.tracking_uri)
        self.directory, self.record = directory, record
        # Two processes that start or end the same run at once must not both take it for theirs, or delete each other's.
        self._run_lock = directory / "mlflow" / "take-up.lock"
        self.experiment_id = self._experiment(record.study)
        self.missing: list[str] = []
        self._numbers: list[dict[str, Any]] = []
        self._tables: dict[str, dict[str, str]] = {}
        self._sent_lines: set[bytes] = set()
        self._next_step = 0
        self._is_watched = self._has_numbers = False
        self._monitor: SystemMetricsMonitor | None = None
        with exclusive(self._run_lock):
            self._run, is_new = self._find_or_make()
        self.run_id: str = self._run.info.run_id
        self.complete = not is_new
        parent = None if record.parent_uid is None else find_run(self.client, self.experiment_id, record.parent_uid)
        if parent is not None:
            set_parent(self.client, self._run, parent)
        if self.complete:
            self.set_tags(record.tags)

    def _find_or_make(self) -> "tuple[Run, bool]":
        from mlflow.entities import Param

        record = self.record
        found = find_runs(self.client, self.experiment_id, record.uid)
        whole = next((run for run in found if is_whole(run, record)), None)
        # Of two outcomes without a key, nothing says which one the other replaces.
        self._delete_others(whole, is_replaced=whole is not None and record.key is not None)
        if whole is not None:
            return whole, False
        parent = {} if record.parent_uid is None else {PARENT_UID_TAG: record.parent_uid}
        tags = {**record.tags, UID_TAG: record.uid, **parent, **self._start_tags()}
        made = self.client.create_run(self.experiment_id, record.started_ms, tags, record.run_name)
        params = [Param(name, value) for name, value in record.params.items()]
        for start in range(0, len(params), MAX_PARAMS_PER_CALL):
            self.client.log_batch(made.info.run_id, params=params[start : start + MAX_PARAMS_PER_CALL])
        return made, True

    def _delete_others(self, kept: "Run | None", *, is_replaced: bool) -> None:
        """Delete the other attempts of this uid; those that may be worth something only where `kept` replaces them.

        These are FINISHED ones, and open ones of other machines, which may have lost their power: a process that does
        feed one sends all of it again at its end. What a living process of this machine feeds is left to it.
        """
        for run in find_runs(self.client, self.experiment_id, self.record.uid):
            owner, status, is_own = _owner(run), run.info.status, run.data.tags.get(START_TAG) == self.record.start
            is_open = status == "RUNNING" and not is_own and not has_died(owner)
            if kept is not None and run.info.run_id == kept.info.run_id:
                continue
            if (is_open or status == FINISHED) and not is_replaced:
                continue
            if is_open and owner.get(HOST) == this_machine():
                continue
            logger.info("Run %s (%s) holds another attempt and is deleted.", run.info.run_name, run.info.run_id)
            self.client.delete_run(run.info.run_id)

    def _start_tags(self) -> dict[str, str]:
        """Name this start of the run and the process that feeds it."""
        owner = {f"{OWNER_PREFIX}{name}": value for name, value in this_process().items()}
        return {START_TAG: self.record.start, **owner}

    def _experiment(self, study: str) -> str:
        """Id of the experiment `rm/<study>`, made where missing and restored where deleted."""
        name = f"{EXPERIMENT_PREFIX}{study}"
        # A server knows its own artifact root; MLflow's default for a bare database is the current folder.
        artifacts = self.directory / "mlflow" / "artifacts" / study
        location = None if self.record.tracking_uri.startswith("http") else artifacts.as_uri()
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            with tolerating("RESOURCE_ALREADY_EXISTS"):  # another run may be faster
                return str(self.client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))
            return self._experiment(study)
        if experiment.lifecycle_stage == "deleted":
            self.client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

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

    def rename(self, name: str) -> None:
        """Call the run otherwise, now that it is known what tells it from others."""
        self.client.update_run(self.run_id, name=name)

    def experiment_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the whole experiment."""
        for name, value in tags.items():
            self.client.set_experiment_tag(self.experiment_id, name, value)

    def study(self, of: str, text: str) -> None:
        """Save views of all runs of one kind, name them by the settings that differ, and describe the experiment."""
        found = self.client.search_runs([self.experiment_id], f"tags.`{KIND_TAG}` = '{of}'")
        for run, name in zip(found, told_apart([run.data.params for run in found]), strict=True):
            named = " · ".join([name, *([run.data.tags[KEY_TAG][:KEY_DIGITS]] if KEY_TAG in run.data.tags else [])])
            if name and named != run.info.run_name:
                self.client.update_run(run.info.run_id, name=named)
        measured = {name for run in found for name in run.data.metrics}
        tags = {name for run in found for name in run.data.tags}
        view = study_view(of, [run.data.params for run in found], measured, tags)
        page = f"#/experiments/{self.experiment_id}"
        links = {
            "Runs side by side": comparison_url(page, view.key, charts=False),
            "Charts of the runs": comparison_url(page, view.key, charts=True),
        }
        self.experiment_tags(view_tags(view) | {NOTE_TAG: experiment_note(text, links)})

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

    def settings(self, tree: Mapping[str, Any]) -> None:
        """Keep all settings as `settings.yaml`, which `rm-opt run --config` takes."""
        self.client.log_dict(self.run_id, dict(tree), "settings.yaml")

    def follow(self, path: str) -> None:
        """Send the lines of a metrics file."""
        if Path(path).is_file():
            self.send_lines(Path(path).read_bytes().splitlines(), Path(path))

    def folder(self, path: str, stage: str) -> None:
        """Send the curves, headline numbers, figures and tables of a stage's artifact."""
        artifact = Path(path)
        self.follow(str(artifact / METRICS_FILE))
        numbers = read_numbers(artifact, stage)
        self._numbers += numbers
        shown, intervals = headline(numbers)
        # One step after the curves: MLflow shows the value of the last step as a run's metric.
        self._send_metrics([(self._next_step, shown)])
        self.set_tags(intervals)
        for part in ("figures", "tables"):
            if (artifact / part).is_dir():
                self.client.log_artifacts(self.run_id, str(artifact / part), f"{stage}/{part}")
        if numbers:  # after each stage: the process may be killed before the end
            self.table("numbers", **plain_table(self._numbers))

    def send_lines(self, lines: Sequence[bytes], source: Path) -> None:
        """Send lines of a metrics file, each at most once in a run, wherever the file has been moved to meanwhile."""
        new = [line for line in dict.fromkeys(lines) if line not in self._sent_lines]
        rows = parse_metric_lines(new, source=source)
        self._next_step = max([self._next_step, *(step + 1 for step, _ in rows)])
        self._send_metrics(rows)
        self._sent_lines.update(new)

    def metrics(self, values: Mapping[str, float], step: int, time_ms: int) -> None:
        """Set numbers of the run as a whole; of several told at one step, MLflow shows the last one."""
        self._send_metrics([(step, dict(values))], time_ms)

    def _send_metrics(self, rows: Sequence[MetricRow], time_ms: int | None = None) -> None:
        """Send rows in as few calls as MLflow allows."""
        from mlflow.entities import Metric

        now_ms = time_ms or time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now_ms, step) for step, values in rows for name, value in values.items()]
        for start in range(0, len(metrics), MAX_METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MAX_METRICS_PER_CALL])
        self._has_numbers = self._has_numbers or bool(metrics)
        if self._is_watched:
            self.watch_machine()

    def table(self, name: str, columns: Sequence[str], data: Sequence[Sequence[Any]]) -> None:
        """Write a table (over an earlier one of this name) and list it for MLflow's evaluation view."""
        self.client.log_dict(self.run_id, {"columns": columns, "data": data}, f"{name}.json")
        self._tables[name] = {"path": f"{name}.json", "type": "table"}
        self.set_tags({LOGGED_ARTIFACTS_TAG: json.dumps(list(self._tables.values()))})

    def watch_machine(self) -> None:
        """Send numbers of the machine as `system/…`, which MLflow shows on a page of their own, until the end.

        They begin after the run's first number: MLflow's comparison of runs opens on the metric that was sent first.
        """
        self._is_watched = True
        if self.complete or self._monitor is not None or not self._has_numbers:
            return
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # Its thread ends at the first failure; an outage is told once, by the tracker.
        logging.getLogger(SystemMetricsMonitor.__module__).setLevel(logging.CRITICAL)
        self._monitor = SystemMetricsMonitor(self.run_id, tracking_uri=self.record.tracking_uri)
        self._monitor.start()

    def stop_watching(self) -> None:
        """End the thread of `watch_machine`."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        self._is_watched = False

    def end(self, status: str, ended_ms: int) -> None:
        """Set the run's final status and end time, after all else: a run that is FINISHED is taken for whole."""
        self.stop_watching()
        uid = self.record.uid
        for child in self.client.search_runs([self.experiment_id], f"tags.`{PARENT_UID_TAG}` = '{uid}'"):
            set_parent(self.client, child, self._run)  # one that looked for its parent before that was there
        if self.missing:
            self.set_tags(texts({MISSING_TAG: "; ".join(self.missing)}))
        with exclusive(self._run_lock):
            self.client.set_terminated(self.run_id, status, ended_ms)
            if status == FINISHED and not self.missing:
                self._delete_others(self._run, is_replaced=True)

    def note(self, text: str) -> None:
        """Set the run's description."""
        self.set_tags({NOTE_TAG: self._linked(text)})

    def _linked(self, note: str) -> str:
        return in_run(note, f"#/experiments/{self.experiment_id}/runs/{self.run_id}/artifacts")[:MAX_VALUE_CHARS]

    def model(
        self, checkpoint: str, name: str, key: str, tags: Mapping[str, str], moves: Mapping[str, bool], note: str
    ) -> str:
        """Register a checkpoint once per key, set its tags and aliases, link it to this run; return its version."""
        judgement = VersionJudgement(tags, moves, self._linked(note))
        with exclusive(self.directory / "mlflow" / "register.lock"):
            version = register_checkpoint(self.client, self._run, Path(checkpoint), name, key, judgement)
        self.set_tags({"rm.model": f"models:/{name}/{version.version}"})
        return str(version.version)

    def confirmation(self, key: str, tags: Mapping[str, str]) -> None:
        """Tell the versions of a training what serving them has shown."""
        with exclusive(self.directory / "mlflow" / "register.lock"):
            found = confirm_versions(self.client, key, tags)
        if found:
            self.set_tags({"rm.model": found[-1]})


def find_run(client: "MlflowClient", experiment_id: str, uid: str) -> "Run | None":
    """Return the run of this uid that started last; None where there is none (or only a deleted one)."""
    return next(iter(find_runs(client, experiment_id, uid)), None)


def find_runs(client: "MlflowClient", experiment_id: str, uid: str) -> "list[Run]":
    """Return all runs of this uid that are not deleted, the one that started last first."""
    order = ["attributes.start_time DESC"]
    return list(client.search_runs([experiment_id], f"tags.`{UID_TAG}` = '{uid}'", order_by=order))


def is_whole(run: "Run", record: RunRecord) -> bool:
    """Whether MLflow has all of the outcome that `record` is about; without a key, of this very start of it.

    A matrix has no key: another start of it may take a further look, or be judged by other code, and may yet fail.
    FINISHED is the last thing that a run is told, after all that belongs to it.
    """
    tags, params = run.data.tags, run.data.params
    is_known = tags.get(START_TAG) == record.start if record.key is None else tags.get(KEY_TAG) == record.key
    is_same = all(params.get(name, text) == text for name, text in record.params.items())
    return is_known and is_same and run.info.status == FINISHED and MISSING_TAG not in tags


def reap_dead_runs(client: "MlflowClient") -> list[str]:
    """Set runs that a process of this machine left open when it was killed to KILLED; return their names.

    A run without an owner, or of another machine, is left alone.
    """
    experiments = client.search_experiments(filter_string=f"name LIKE '{EXPERIMENT_PREFIX}%'")
    is_ours = f"tags.`{OWNER_PREFIX}{HOST}` = '{this_machine()}'"
    running = client.search_runs(
        [experiment.experiment_id for experiment in experiments], f"attributes.status = 'RUNNING' and {is_ours}"
    )
    ended = []
    for run in running:
        if has_died(_owner(run)):
            # Read once more: between the search and the look at its process it may have ended well.
            now = client.get_run(run.info.run_id)
            if now.info.status == "RUNNING" and _owner(now) == _owner(run):
                client.set_terminated(run.info.run_id, "KILLED")
                ended.append(run.info.run_name)
    return ended


def _owner(run: "Run") -> dict[str, str]:
    tags = run.data.tags
    return {name: tags[f"{OWNER_PREFIX}{name}"] for name in OWNER_FIELDS if f"{OWNER_PREFIX}{name}" in tags}


def set_parent(client: "MlflowClient", child: "Run", parent: "Run") -> None:
    """Make `child` a child of `parent`, unless it is."""
    from mlflow.entities import RunTag

    # Parent and child may do this at the same moment. MLflow's `set_tag` reads and then inserts, so the second of two
    # fails on the table's key; `log_batch` tries again.
    if child.data.tags.get(PARENT_TAG) != parent.info.run_id:
        client.log_batch(child.info.run_id, tags=[RunTag(PARENT_TAG, parent.info.run_id)])
