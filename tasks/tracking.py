"""Tracking that never slows a run down and never stops it.

Each call of a `RunTracker` is written down in a `RunRecord` and handed to one background thread, the only one that
uses MLflow (tasks/mlflow_run.py): importing and connecting happen while the run continues, and order is kept. Where
MLflow fails, that is said once and the record goes to `$RM_OPT_HOME/unsynced/`; at the end of the run all of it is sent
again, and else tasks/sync.py (`rm-opt store sync`) sends it later. What MLflow refuses for good is left out then, and
the run is tagged `rm.missing_files`. Call `tasks.home.configure_environment` first.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import RmcoreError, StoreError
from rmcore.core.files import exclusive
from rmcore.core.loggers import give_lines, open_loggers, require_loggers
from rmcore.core.store import flatten
from rmcore.core.tracking import NullTracker, Tracker
from rmcore.reporting.schema import NextRung, Verdict
from tasks.comparison_view import View, comparison_url, view_tags
from tasks.headline import compared_settings, metric_name
from tasks.home import MLFLOW_PORT, home, tracking_address
from tasks.mlflow_client import in_one_line, is_outage, without_login
from tasks.mlflow_run import NOTE_TAG, MlflowRun, reap_dead_runs, replay
from tasks.model_training import ADDRESS_PARAMETER
from tasks.model_versions import alias_moves, confirmation_tags, judgement_tags
from tasks.run_owner import this_process
from tasks.run_record import SYNC_LOCK, GrowingFile, RunRecord, plain_table, texts

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 3.0
_REAPED: set[str] = set()
"""Addresses at which this process has looked for runs that died."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class RunTracker:
    """One MLflow run, fed from any thread without waiting. Close it with `end`, or use it in a `with` statement."""

    def __init__(self, record: RunRecord, directory: Path) -> None:
        self.record = record
        self.view_key: str | None = None
        """Key of the view that was published."""
        self.logger_folder: Path | None = None
        """Folder of what other loggers keep; None without any."""
        self._directory = directory
        self._offline = threading.Event()
        self._unsaved = False
        """Whether it was said that the record cannot be written."""
        self._run: MlflowRun | None = None
        self._loggers = ExitStack()
        self._logger: Tracker = NullTracker()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._results: list[Future[Any]] = []
        self._submit(self._open)
        self._submit(self._reap, is_recorded=False)

    @classmethod
    def start(
        cls,
        study: str,
        run_name: str,
        tags: Mapping[str, str],
        params: Mapping[str, Any] | PipelineConfig,
        *,
        also: Collection[str] = (),
        uid: str | None = None,
        parent_uid: str | None = None,
        loggers: Sequence[str] = (),
    ) -> Self:
        """Open a run `run_name` in the experiment `rm/<study>` at `$MLFLOW_TRACKING_URI`; returns at once.

        With a `uid` that MLflow knows in that experiment, a FINISHED run with the same tag `rm.key` is complete and
        gets nothing but tags, whatever it is told; else a new run is made, which replaces any other when it ends
        FINISHED. So give `rm.key` here if the outcome is known, and set it as a tag later if it is still to be
        computed.

        Args:
            study: name of the study.
            run_name: shown in MLflow's run table.
            tags: as in DESIGN: `rm.kind`, `rm.seed`, `rm.key` and so on.
            params: the settings. Of a whole configuration, those by which runs are compared and those that are not the
                defaults become parameters (`compared_settings`); all of it is the artifact `settings.yaml`.
            also: names of settings that become parameters, too.
            uid: any text without quotes that names the run for ever; None: a new run each time.
            parent_uid: uid of the run that this one becomes a child of, started before or after it.
            loggers: names of `rmcore.core.loggers` that get the curves, too; their files are below `$RM_OPT_HOME`.

        Raises:
            ConfigError: a logger cannot be used.
        """
        require_loggers(loggers)
        directory = home()
        record = RunRecord(
            study=study,
            run_name=run_name,
            tags={"rm.study": study, **texts(tags)},
            params=texts(compared_settings(params, also) if isinstance(params, PipelineConfig) else params),
            parent_uid=parent_uid,
            tracking_uri=tracking_address(directory),
            owner=this_process(),
        )
        if uid is not None:
            record.uid = uid
        tracker = cls(record, directory)
        tree = params.model_dump(mode="json") if isinstance(params, PipelineConfig) else dict(params)
        if isinstance(params, PipelineConfig):
            tracker._tell("settings", tree=tree)
        if loggers:
            tracker._log_also(loggers, flatten(tree))
        return tracker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end("FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._tell("set_tags", tags=texts(tags))

    def rename(self, name: str) -> None:
        """Call the run otherwise in MLflow."""
        self._tell("rename", name=name)

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Set numbers of the run as a whole, for example a matrix's summary. A number that is not finite is left out.

        A name without a group is in `summary/`. Told again at the same step, the last value holds.
        """
        finite = {metric_name("summary", name): float(value) for name, value in values.items() if math.isfinite(value)}
        self._tell("metrics", values=finite, step=step, time_ms=time.time_ns() // 1_000_000)

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Keep a table as the artifact `<name>.json`, in the form of `mlflow.log_table`; replaces one of this name.

        Raises:
            TypeError: a value is neither a number, a text, a boolean nor None.
        """
        self._tell("table", name=name, **plain_table(rows))

    def log_dataset(self, name: str, fingerprint: str, source: str, num_rows: int) -> None:
        """Name a data set as the run's input: its content digest, where its rows came from, how many there are."""
        self._tell("dataset", name=name, fingerprint=fingerprint, source=source, num_rows=num_rows)

    def log_file(self, path: Path, folder: str) -> None:
        """Keep a copy of the file `path` in `folder` of the run's artifacts ("" for the top)."""
        self._tell("file", path=_existing(path), folder=folder)

    def watch_machine(self) -> None:
        """Send how busy this machine is, every 10 seconds from the run's first number to its end, while MLflow answers.

        It is not written down for later.
        """
        self._submit(lambda: self._opened().watch_machine(), is_recorded=False)

    def describe(self, note: str) -> None:
        """Set the run's description: Markdown by `rmcore.reporting.html.note`, with links to files of the run."""
        self._tell("note", text=note)

    def describe_experiment(self, note: str) -> None:
        """Set the description of the whole experiment, which its page shows above its runs."""
        self._tell("experiment_tags", tags={NOTE_TAG: note})

    def describe_study(self, kind: str, text: str) -> None:
        """Save views of the experiment's runs whose tag `rm.kind` is `kind`, and describe it: links to them, `text`."""
        self._tell("study", of=kind, text=text)

    def publish_view(self, view: View) -> None:
        """Save the table and the charts of a view in the experiment, for `comparison`."""
        self._tell("experiment_tags", tags=view_tags(view))
        self.view_key = view.key

    def log_artifact_folder(self, folder: Path, stage: str) -> None:
        """Send what the stage's artifact at `folder` holds: headline numbers, figures, tables, curves.

        Lines of `metrics.jsonl` that were followed already are not sent again. Headline numbers are recorded one step
        after the last line, and all numbers of all stages are the run's `numbers.json`. Works the same for an artifact
        that was found in the store.

        Raises:
            StoreError: there is no such folder.
        """
        self._tell("folder", path=_existing(folder), stage=stage)

    def register_model(
        self,
        checkpoint: Path,
        *,
        name: str,
        key: str,
        gate: Sequence[Mapping[str, Any]],
        readiness: Mapping[str, Any],
        verdict: Verdict,
        next_rung: NextRung | None,
        note: str,
    ) -> str | None:
        """Put a checkpoint into MLflow's registry as `name`: a pyfunc model (prompt, response) -> reward. Waits.

        Its version gets the tags and aliases that its evidence allows (tasks/model_versions.py). A `key` (of the
        checkpoint's artifact) that is registered already gets no second version, only fresh tags, aliases and note.

        Returns:
            The version, or None when MLflow does not answer (`rm-opt store sync` registers it later).

        Raises:
            StoreError: there is no such checkpoint.
        """
        tags, moves = judgement_tags(gate, readiness, verdict, next_rung), alias_moves(verdict)
        event = {"checkpoint": _existing(checkpoint), "name": name, "key": key, "note": note}
        version = self._tell("model", **event, tags=tags, moves=moves).result()
        return None if version is None else str(version)

    def confirm_model(self, key: str, verdict: Verdict) -> None:
        """Say of what is registered under the `key` of a training what serving it has shown: a verdict of level 4.

        Gained, it gets the alias `confirmed`; lost, it loses `ready` and `confirmed`. What is not registered stays so.
        """
        self._tell("confirmation", key=key, tags=confirmation_tags(verdict))

    @contextmanager
    def follow(self, path: Path) -> Iterator[None]:
        """Send the lines that the metrics file `path` gains inside the `with` block, every few seconds.

        The file may not exist yet, and its folder may be renamed meanwhile.
        """
        self.record.events.append({"kind": "follow", "path": str(Path(path).resolve())})
        growing, stop = GrowingFile(Path(path)), threading.Event()

        def send() -> None:
            if lines := growing.new_lines():
                give_lines(lines, self._logger)
                self._submit(lambda: self._opened().send_lines(lines, growing.path))

        def look_regularly() -> None:
            while not stop.wait(FOLLOW_SECONDS):
                send()

        looker = threading.Thread(target=look_regularly, name="metrics-follower", daemon=True)
        looker.start()
        try:
            yield
        finally:
            stop.set()
            looker.join()
            send()
            growing.close()

    def replay(self, path: Path) -> None:
        """Give the rows of a `metrics.jsonl` that was there already to the other loggers; MLflow has its own way."""
        give_lines(path.read_bytes().splitlines(), self._logger)

    def _log_also(self, loggers: Sequence[str], params: Mapping[str, Any]) -> None:
        study, run = self.record.study, self.record.run_name
        begun = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        self.logger_folder = self._directory / "loggers" / f"{run}-{begun}-{self.record.start}"
        try:
            opened = open_loggers(loggers, study=study, run=run, folder=self.logger_folder, config=params)
            self._logger = self._loggers.enter_context(opened)
        except RmcoreError:
            self.end("FAILED")
            raise

    def end(self, status: Status = "FINISHED") -> None:
        """Close the run: waits until everything is sent (or written down as unsynced).

        A run that could not take something it was told is never FINISHED: that would make it complete.
        """
        if status == "FINISHED" and any(result.exception() for result in self._results):
            status = "FAILED"
        self._loggers.close()
        self._tell("end", status=status, ended_ms=time.time_ns() // 1_000_000)
        self._results.append(self._thread.submit(self._catch_up))
        self._thread.shutdown()
        for result in self._results:
            result.result()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None when MLflow does not answer. Waits for the connection."""
        self._results[0].result()
        return self._run.run_id if self._run else None

    @property
    def url(self) -> str | None:
        """Address of the run in MLflow's UI (for a database file: where `rm-opt up` serves it); None without MLflow."""
        page = self._experiment_page()
        return None if page is None else f"{page}/runs/{self.run_id}?{ADDRESS_PARAMETER}"

    @property
    def pending(self) -> bool:
        """Whether MLflow lacks something of this run, so that it waits for `rm-opt store sync`."""
        return self._offline.is_set()

    def comparison(self, *, charts: bool = False) -> str | None:
        """Address of MLflow's table (or charts) of the published view; None without MLflow or view."""
        page = self._experiment_page()
        if page is None or self.view_key is None or self.pending:
            return None
        return comparison_url(page, self.view_key, charts=charts)

    def _experiment_page(self) -> str | None:
        if self.run_id is None or self._run is None:
            return None
        uri = self.record.tracking_uri
        server = without_login(uri).rstrip("/") if uri.startswith("http") else f"http://127.0.0.1:{MLFLOW_PORT}"
        return f"{server}/#/experiments/{self._run.experiment_id}"

    def _open(self) -> None:
        self._run = MlflowRun(self.record, self._directory)

    def _reap(self) -> None:
        """End what a killed process left open; the first tracker of a process looks, after its own run is there."""
        uri = self.record.tracking_uri
        if uri not in _REAPED:
            _REAPED.add(uri)
            if names := reap_dead_runs(self._opened().client):
                logger.info("Runs whose process had died were open in MLflow and are set to KILLED: %s", names)

    def _opened(self) -> MlflowRun:
        assert self._run is not None  # noqa: S101 - actions run after `_open`, and not at all when it failed
        return self._run

    def _tell(self, kind: str, **details: Any) -> "Future[Any]":
        event = {"kind": kind, **details}
        self.record.events.append(event)
        return self._submit(lambda: self._opened().apply(event))

    def _submit(self, action: Callable[[], Any], *, is_recorded: bool = True) -> "Future[Any]":
        result = self._thread.submit(self._attempt, action, is_recorded)
        self._results.append(result)
        return result

    def _attempt(self, action: Callable[[], Any], is_recorded: bool) -> Any:
        """Run `action` unless MLflow is away; save the record where MLflow misses something of it."""
        done = None
        if not self._offline.is_set():
            try:
                done = action()
            except RmcoreError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, hours of computation must not end for it
                self._report_failure(error, is_recorded)
        if self.pending:
            self._save()
        return done

    def _report_failure(self, error: Exception, is_recorded: bool) -> None:
        reason, address = in_one_line(error), without_login(self.record.tracking_uri)
        if self._run is not None and not is_recorded and not is_outage(error):
            logger.warning("MLflow at %s failed (%s): the run continues and loses nothing of its own.", address, reason)
            return
        self._offline.set()
        logger.warning(
            "MLflow at %s failed (%s): run %s continues without it, its metrics are on disk and its record is %s. "
            "All of it is sent at the end of the run, or by `rm-opt store sync` when MLflow is back.",
            *(address, reason, self.record.run_name, self.record.path(self._directory)),
        )

    def _catch_up(self) -> None:
        """At the end, send all that MLflow has missed in an outage, if it answers again; else the record waits."""
        if not self._offline.is_set():
            return
        if self._run is not None:
            self._run.stop_watching()
        try:
            with exclusive(self._directory / SYNC_LOCK):
                self._run = replay(self.record, self._directory)
                self.record.path(self._directory).unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 - as in `_attempt`: the record is saved, and the outage was told
            logger.debug("MLflow is still away: %s", in_one_line(error))
            return
        self._offline.clear()
        if not self._run.missing:
            logger.warning("MLflow answers again and has all of run %s.", self.record.run_name)

    def _save(self) -> None:
        try:
            self.record.save(self._directory)
        except OSError as error:  # a full disk, above all; what was computed must not be lost with it
            if not self._unsaved:
                self._unsaved = True
                logger.warning(
                    "The record of run %s cannot be written (%s), so MLflow may never get what it has missed. The "
                    "outcomes are in the store: make room, and run the same command again, which sends them.",
                    *(self.record.run_name, in_one_line(error)),
                )


def _existing(path: Path) -> str:
    if not Path(path).exists():
        raise StoreError(f"{path} does not exist: it was never written, or was removed. Run the stage again.")
    return str(Path(path).resolve())
