"""A run in MLflow as a function of its record (`tasks/run_record.py`) and of the artifacts that this names.

`MlflowRun` looks for the run, makes it where there is none, and sends what it lacks, so it may be told the same again.
A run that MLflow has whole gets nothing but tags and descriptions; one that was begun for the same start of it is
completed. Any other attempt is left alone until one has finished, and deleted then, which MLflow can undo. So two
outcomes never mix in one run.

A child looks for its parent by uid when it begins, and a parent for its children when it ends: either may come first.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import DataError, ServiceError, StoreError
from rmcore.core.files import exclusive, try_exclusive
from rmcore.core.processes import has_died
from rmcore.core.tracking import METRICS_FILE
from rmcore.reporting.html.note import experiment_note, in_run
from rmcore.reporting.runs import KEY_DIGITS
from tasks.comparison_view import EXPERIMENT_TAGS, comparison_url, study_view, told_apart, view_tags
from tasks.local_services import MLFLOW_SERVER, running_services
from tasks.mlflow_client import connect, in_one_line, is_outage, tolerating, without_login
from tasks.model_versions import confirm_versions, register_checkpoint
from tasks.passwords import mlflow_login, password
from tasks.run_record import (
    KEY_TAG,
    MAX_VALUE_CHARS,
    MetricRow,
    RunRecord,
    headline,
    metric_name,
    parse_metric_lines,
    plain_table,
    read_numbers,
    read_record,
    texts,
    unsynced_folder,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

logger = logging.getLogger(__name__)

MAX_METRICS, MAX_PARAMS, MAX_TAGS = 800, 100, 100
"""Entries of one log_batch call; MLflow's own limits are 1000 of all kinds, 100 parameters and 100 tags."""
NOTE_TAG = "mlflow.note.content"
"""Tag of the description that MLflow shows on a run's page."""
PARENT_TAG = "mlflow.parentRunId"
UID_TAG, PARENT_UID_TAG, KIND_TAG, START_TAG = "rm.run_uid", "rm.parent_uid", "rm.kind", "rm.start"
MISSING_TAG = "rm.missing_files"
"""Names what the run was sent without: such a run is not whole."""
SYNC_LOCK = Path("mlflow", "sync.lock")
"""Below a home: held while waiting records are sent."""


class MlflowRun:
    """One run of MLflow that is made equal to its record. Raises what MLflow raises; used by one thread."""

    def __init__(self, record: RunRecord, directory: Path) -> None:
        """Find or make the run; `directory` is the home, for locks and the artifacts of a bare database."""
        self.client, self.directory, self.tracking_uri = connect(record.tracking_uri), directory, record.tracking_uri
        self.experiment_id = self._experiment(record)
        self.version: str | None = None
        """Version of the registered model."""
        self.missing: list[str] = []
        self._tags: dict[str, str] = {}
        """Tags that follow from other runs and from artifacts."""
        self._numbers: list[dict[str, Any]] = []
        self._next_step = 0
        self._unsent: list[tuple[str, float, int]] = []
        self._last: dict[str, int] = {}
        """Step of each metric up to which it was sent or is in `_unsent`."""
        self._monitor: SystemMetricsMonitor | None = None
        known = self._runs_of(UID_TAG, record.uid)
        whole = next((run for run in known if is_whole(run, record)), None)
        begun = next((run for run in known if run.data.tags.get(START_TAG) == record.start), None)
        self.complete = whole is not None
        self._run = whole or begun or self._make(record)
        self.run_id: str = self._run.info.run_id
        self._sent: dict[str, Any] = {"name": self._run.info.run_name}
        """Parts of the record that MLflow has."""
        self._shown, self._sent_tags = dict(self._run.data.metrics), dict(self._run.data.tags)
        for name in () if self.complete else self._shown:
            self._last[name] = max(point.step for point in self.client.get_metric_history(self.run_id, name))
        for parent in self._runs_of(UID_TAG, record.parent_uid)[:1] if record.parent_uid else ():
            self._tags[PARENT_TAG] = parent.info.run_id

    def _make(self, record: RunRecord) -> "Run":
        parent = {} if record.parent_uid is None else {PARENT_UID_TAG: record.parent_uid}
        tags = {**record.tags, UID_TAG: record.uid, **parent, START_TAG: record.start}
        return self.client.create_run(self.experiment_id, record.started_ms, tags, record.run_name)

    def _experiment(self, record: RunRecord) -> str:
        """Id of the experiment `rm/<study>`, made where missing and restored where deleted."""
        name = f"rm/{record.study}"
        # A server knows its own artifact root; MLflow's default for a bare database is the current folder.
        artifacts = self.directory / "mlflow" / "artifacts" / record.study
        location = None if record.tracking_uri.startswith("http") else artifacts.as_uri()
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            with tolerating("RESOURCE_ALREADY_EXISTS"):  # another run may be faster
                return str(self.client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))
            return self._experiment(record)
        if experiment.lifecycle_stage == "deleted":
            self.client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    def _runs_of(self, tag: str, value: str) -> "list[Run]":
        """All runs with this tag that are not deleted, the one that started last first."""
        order = ["attributes.start_time DESC"]
        return list(self.client.search_runs([self.experiment_id], f"tags.`{tag}` = '{value}'", order_by=order))

    def send(self, record: RunRecord, *, is_last: bool = False) -> None:
        """Send what MLflow lacks of the record and of the files that it names.

        In the last attempt what is gone from the disk, or refused, is named and left out.
        """
        for name, value, make in self._parts(record):
            if value is None or self._sent.get(name) == value:
                continue
            try:
                make(value)
            except Exception as error:
                if not is_last or is_outage(error):
                    raise
                self.missing.append(in_one_line(error))
                run = record.run_name
                logger.warning("%s, so run %s goes to MLflow without it; run the same again.", self.missing[-1], run)
            self._sent[name] = value

    def _parts(self, record: RunRecord) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
        """Give name, value and sender of each part of the run: its end after all else, a FINISHED run is whole."""
        yield "experiment tags", record.experiment_tags, self._tag_experiment
        if not self.complete:
            yield "name", record.run_name, lambda name: self.client.update_run(self.run_id, name=name)
            yield "settings", record.settings, lambda tree: self.client.log_dict(self.run_id, tree, "settings.yaml")
            for path, stage in record.folders.items():
                yield path, stage, partial(self._send_folder, Path(path))
            for curves in record.curves:
                yield curves, _lines_so_far(Path(curves), record), partial(self._add_curves, Path(curves))
            for path, folder in record.files.items():
                yield path, folder, partial(self._send_file, Path(path))
            numbers = plain_table(self._numbers) if self._numbers else None
            yield "numbers", numbers, lambda table: self.client.log_dict(self.run_id, table, "numbers.json")
        yield "numbers and tags", object(), lambda _: self._send_batch(record)
        yield "study", record.study_text, self._describe_study
        yield "model", record.model, self._register
        yield "confirmation", record.confirmation, self._confirm
        yield "end", record.status, lambda _: self._end(record)

    def _tag_experiment(self, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self.client.set_experiment_tag(self.experiment_id, name, value)

    def _send_folder(self, artifact: Path, stage: str) -> None:
        """Send the curves, headline numbers, figures and tables of a stage's artifact."""
        if not artifact.is_dir():
            raise StoreError(f"{artifact} is gone")
        curves = artifact / METRICS_FILE
        self._next_step = max(self._next_step, self._add_curves(curves, _complete_lines(curves)) + 1)
        numbers = read_numbers(artifact, stage)
        self._numbers += numbers
        shown, intervals = headline(numbers)
        self._tags |= intervals
        # One step after the curves: MLflow shows the value of the last step as a run's metric.
        self._add_rows([(self._next_step, shown)])
        for part in ("figures", "tables"):
            if (artifact / part).is_dir():
                self.client.log_artifacts(self.run_id, str(artifact / part), f"{stage}/{part}")

    def _add_curves(self, path: Path, lines: Sequence[bytes]) -> int:
        """Add the rows of a metrics file; returns the last step."""
        rows = parse_metric_lines(lines, source=path)
        self._add_rows(rows)
        return max((step for step, _ in rows), default=-1)

    def _add_rows(self, rows: Iterable[MetricRow]) -> None:
        """Add numbers to those that are sent next, unless their step was reached: files repeat what was followed."""
        for step, values in rows:
            new = {name: value for name, value in values.items() if step > self._last.get(name, -1)}
            self._unsent += [(name, value, step) for name, value in new.items()]
            self._last |= dict.fromkeys(new, step)

    def _send_file(self, path: Path, folder: str) -> None:
        if not path.exists():
            raise StoreError(f"{path} is gone")
        self.client.log_artifact(self.run_id, str(path), folder or None)

    def _send_batch(self, record: RunRecord) -> None:
        """Send curves, numbers, parameters and tags in as few calls as MLflow allows."""
        from mlflow.entities import Metric, Param, RunTag

        now_ms, unsent, self._unsent = time.time_ns() // 1_000_000, self._unsent, []
        tags, params = self._tags | texts(record.tags), list[Param]()
        if record.note is not None:
            tags[NOTE_TAG] = self._linked(record.note)
        if not self.complete:
            finite = {metric_name("summary", name): value for name, value in record.numbers.items() if isfinite(value)}
            unsent += [(name, value, 0) for name, value in finite.items() if self._shown.get(name) != value]
            self._shown |= finite
            params = [Param(*one) for one in record.params.items()] if self._sent.get("params") is None else []
        metrics = [Metric(name, value, now_ms, step) for name, value, step in unsent]
        changed = [RunTag(name, text) for name, text in tags.items() if self._sent_tags.get(name) != text]
        while metrics or params or changed:
            self.client.log_batch(self.run_id, metrics[:MAX_METRICS], params[:MAX_PARAMS], changed[:MAX_TAGS])
            metrics, params, changed = metrics[MAX_METRICS:], params[MAX_PARAMS:], changed[MAX_TAGS:]
        self._sent["params"], self._sent_tags = True, self._sent_tags | tags

    def watch_machine(self) -> None:
        """Send numbers of the machine and its GPUs as `system/…`, which MLflow shows on a page of their own.

        They begin after the run's first number: MLflow's comparison of runs opens on the metric that was sent first.
        """
        if self.complete or self._monitor is not None or not (self._shown or self._last):
            return
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # Its thread ends at the first failure; an outage is told once, by the tracker. A GPU that cannot tell one of
        # its numbers would say so every ten seconds.
        logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)
        self._monitor = SystemMetricsMonitor(self.run_id, tracking_uri=self.tracking_uri)
        self._monitor.start()

    def stop_watching(self) -> None:
        """End the thread of `watch_machine`."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None

    def _describe_study(self, told: Sequence[str]) -> None:
        """Save views of all runs of one kind, name them by the settings that differ, and describe the experiment."""
        kind, text = told
        found = self.client.search_runs([self.experiment_id], f"tags.`{KIND_TAG}` = '{kind}'")
        params = [run.data.params for run in found]
        for run, name in zip(found, told_apart(params), strict=True):
            named = " · ".join([name, *([run.data.tags[KEY_TAG][:KEY_DIGITS]] if KEY_TAG in run.data.tags else [])])
            if name and named != run.info.run_name:
                self.client.update_run(run.info.run_id, name=named)
        measured = {name for run in found for name in run.data.metrics}
        view = study_view(kind, params, measured, {name for run in found for name in run.data.tags})
        page = f"#/experiments/{self.experiment_id}"
        links = {
            "Runs side by side": comparison_url(page, view.key, charts=False),
            "Charts of the runs": comparison_url(page, view.key, charts=True),
        }
        self._tag_experiment(view_tags(view) | {NOTE_TAG: experiment_note(text, links)})

    def _linked(self, note: str) -> str:
        return in_run(note, f"#/experiments/{self.experiment_id}/runs/{self.run_id}/artifacts")[:MAX_VALUE_CHARS]

    def _register(self, model: Mapping[str, Any]) -> None:
        """Register a checkpoint once per key, set its tags and aliases, link it to this run."""
        with exclusive(self.directory / "mlflow" / "register.lock"):
            told = {**model, "note": self._linked(model["note"])}
            self.version = register_checkpoint(self.client, self._run, **told)
        self.client.set_tag(self.run_id, "rm.model", f"models:/{model['name']}/{self.version}")

    def _confirm(self, told: Mapping[str, Any]) -> None:
        """Tell the versions of a training what serving them has shown."""
        with exclusive(self.directory / "mlflow" / "register.lock"):
            found = confirm_versions(self.client, told["key"], told["tags"])
        if found:
            self.client.set_tag(self.run_id, "rm.model", found[-1])

    def _end(self, record: RunRecord) -> None:
        self.stop_watching()
        for child in self._runs_of(PARENT_UID_TAG, record.uid):  # that looked for its parent before that was there
            if child.data.tags.get(PARENT_TAG) != self.run_id:
                self.client.set_tag(child.info.run_id, PARENT_TAG, self.run_id)
        if self.missing:
            self.client.set_tag(self.run_id, MISSING_TAG, "; ".join(self.missing)[:MAX_VALUE_CHARS])
        # Two processes that end the same run at once must not delete each other's.
        with exclusive(self.directory / "mlflow" / "take-up.lock"):
            if not self.complete:
                self.client.set_terminated(self.run_id, record.status, record.ended_ms)
            if self.complete or (record.status == "FINISHED" and not self.missing):
                for run in self._runs_of(UID_TAG, record.uid):
                    if run.info.run_id != self.run_id:
                        logger.info("Run %s holds another attempt and is deleted.", run.info.run_id)
                        self.client.delete_run(run.info.run_id)


def _complete_lines(path: Path) -> list[bytes]:
    """The lines of a file that may grow, whose last one is to come; none where it is not there, or has moved."""
    with suppress(FileNotFoundError):
        return path.read_bytes().split(b"\n")[:-1]
    return []


def _lines_so_far(path: Path, record: RunRecord) -> list[bytes] | None:
    """The same; None where they cannot be read at this look, and the run will have another one."""
    try:
        return _complete_lines(path)
    except OSError:
        if record.status is not None:
            raise
        return None


def is_whole(run: "Run", record: RunRecord) -> bool:
    """Whether MLflow has all of the outcome that `record` is about; without a key, of this very start of it.

    A matrix has no key: another start of it may take a further look, or be judged by other code, and may yet fail.
    """
    tags, params, key = run.data.tags, run.data.params, record.tags.get(KEY_TAG)
    is_known = tags.get(START_TAG) == record.start if key is None else tags.get(KEY_TAG) == key
    is_same = all(params.get(name, text) == text for name, text in record.params.items())
    return is_known and is_same and run.info.status == "FINISHED" and MISSING_TAG not in tags


def sync_pending(directory: Path, tracking_uri: str | None = None) -> list[str]:
    """Complete every run that waits in `directory/unsynced/` in MLflow; names of the runs sent, parents first.

    Safe to repeat. A run that is still running is left to itself; one whose process died is KILLED. What is gone from
    the store meanwhile is named in a warning and left out; the run is tagged `rm.missing_files`, so that the next start
    of the same run sends it.

    Args:
        directory: the home that holds the records.
        tracking_uri: where to send them; default: the address each run was meant for.

    Raises:
        ServiceError: MLflow still fails; the runs not sent yet stay.
        DataError: records are damaged; they are named and stay, all others were sent.
    """
    with exclusive(directory / SYNC_LOCK):
        sent, failures, damaged = _send_waiting(directory, tracking_uri, _is_over)
    if failures:
        raise ServiceError(
            f"MLflow still fails for {len(failures)} of {len(failures) + len(sent)} waiting runs "
            f"({'; '.join(failures[:3])}); they stay in {unsynced_folder(directory)}, {len(sent)} were sent. Start "
            "MLflow (`rm-opt up` for the local one) and run `rm-opt store sync` again, with --to ADDRESS if it has "
            "moved." + "".join(f" And {reason}" for reason in damaged)
        )
    if damaged:
        raise DataError(f"{len(damaged)} waiting records are damaged, {len(sent)} runs were sent. {' '.join(damaged)}")
    return sent


@functools.cache
def end_dead_runs(directory: Path, tracking_uri: str) -> None:
    """Complete the runs at this address whose process was killed on this machine, as KILLED; once in a process."""
    with try_exclusive(directory / SYNC_LOCK) as is_free:
        if not is_free:  # another process sends them, which may take long: this one has a run of its own to feed
            return
        sent, *failed = _send_waiting(
            directory, None, lambda record: _is_cut_off(record) and record.tracking_uri == tracking_uri
        )
    if sent or any(failed):
        logger.info("Runs whose process had died are set to KILLED in MLflow: %s; not sent: %s", sent, failed)


def _is_over(record: RunRecord) -> bool:
    if record.status is None and not _is_cut_off(record):
        logger.warning("Run %s is still running: it sends its record itself, at its end.", record.run_name)
        return False
    return True


def _is_cut_off(record: RunRecord) -> bool:
    """Whether the process of a run that has not ended has died."""
    return record.status is None and (not record.owner or has_died(record.owner))


def _send_waiting(
    directory: Path, tracking_uri: str | None, is_chosen: Callable[[RunRecord], bool]
) -> tuple[list[str], list[str], list[str]]:
    """Send the waiting records that are chosen, parents first: names of those sent, failures, damaged records.

    The caller holds `SYNC_LOCK`.
    """
    sent, failures, damaged, chosen = list[str](), list[str](), list[str](), dict[Path, RunRecord]()
    for path in unsynced_folder(directory).glob("*.json"):
        try:
            record = read_record(path)
        except DataError as error:
            damaged += [str(error)] if path.exists() else []  # else its run has just sent it
            continue
        if is_chosen(record) and path.exists():  # as above: a process that ended well left no record
            chosen[path] = record if record.status else replace(record, status="KILLED")
    order = sorted(chosen.items(), key=lambda one: (one[1].parent_uid is not None, one[1].started_ms, one[1].uid))
    for path, record in order:
        target = tracking_uri or record.tracking_uri
        try:
            with _login_for(target, directory):
                MlflowRun(replace(record, tracking_uri=target), directory).send(record, is_last=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are sent and this one stays
            failures.append(f"{record.run_name} to {without_login(target)}: {in_one_line(error)}")
            continue
        path.unlink(missing_ok=True)
        sent.append(record.run_name)
    return sent, failures, sorted(damaged)


@contextmanager
def _login_for(tracking_uri: str, directory: Path) -> Iterator[None]:
    """Log in to this home's server with its password, and tell it to no other: a record may be meant for another's."""
    login, before = mlflow_login(password(directory)), dict(os.environ)
    local = running_services(directory).get(MLFLOW_SERVER)
    if local is not None and tracking_uri == local.url:
        os.environ |= login
    elif login.items() <= before.items():
        for name in login:
            del os.environ[name]
    try:
        yield
    finally:
        os.environ |= {name: before[name] for name in login if name in before}
