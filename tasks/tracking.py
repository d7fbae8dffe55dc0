"""Tracking that never slows a run down and never stops it.

Each call of a `RunTracker` is written down in a `RunRecord` and handed to one background thread, the only one that
uses MLflow (tasks/mlflow_run.py): importing and connecting happen beside the run, and order is kept. When MLflow
fails, that is said once, the record goes to `$RM_OPT_HOME/unsynced/`, and tasks/sync.py (`rm-opt sync`) sends it
later. Call `tasks.home.configure_environment` first.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rmcore.core.errors import RmcoreError, StoreError
from rmcore.core.loggers import give_lines, open_loggers, require_loggers
from rmcore.core.tracking import NullTracker, Tracker
from rmcore.reporting.schema import NextRung, Verdict
from tasks.comparison_view import comparison_url
from tasks.home import MLFLOW_PORT, home, tracking_address
from tasks.mlflow_client import in_one_line, without_login
from tasks.mlflow_run import NOTE_TAG, MlflowRun
from tasks.model_training import ADDRESS_PARAMETER
from tasks.model_versions import alias_moves, confirmation_tags, judgement_tags
from tasks.run_identity import reap_dead_runs
from tasks.run_record import Event, GrowingFile, RunRecord, metric_name, plain_table, texts

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 3.0
_REAPED: set[str] = set()
"""Addresses at which this process has looked for runs that died."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class RunTracker:
    """One MLflow run, fed from any thread without waiting. Close it with `end`, or use it in a `with` statement."""

    def __init__(self, record: RunRecord, directory: Path, *, resume: bool) -> None:
        self.record = record
        self.matrix_key: str | None = None
        """Key of the matrix whose comparison view was published."""
        self.logger_folder: Path | None = None
        """Folder of what other loggers keep; None without any."""
        self._directory = directory
        self._resume = resume
        self._offline = threading.Event()
        self._unsaved = False
        """Whether it was said that the record cannot be written."""
        self._run: MlflowRun | None = None
        self._loggers = ExitStack()
        self._logger: Tracker = NullTracker()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._results: list[Future[Any]] = []
        self._submit(self._open)
        self._submit(self._reap)

    @classmethod
    def start(
        cls,
        study: str,
        run_name: str,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
        *,
        uid: str | None = None,
        parent_uid: str | None = None,
        loggers: Sequence[str] = (),
    ) -> Self:
        """Open a run `run_name` in the experiment `rm/<study>` at `$MLFLOW_TRACKING_URI`; returns at once.

        With a `uid` that MLflow knows in that experiment, the run is resumed: a FINISHED run with the same tag
        `rm.key` is complete and gets nothing but tags, whatever it is told; an unfinished one is completed; one with
        another `rm.key` or other params is renamed "(superseded)" and a new run made (tasks/run_identity.py). So give
        `rm.key` here if the outcome is known, and set it as a tag later if it is still to be computed.

        Args:
            study: name of the study.
            run_name: shown in MLflow's run table.
            tags: as in DESIGN: `rm.kind`, `rm.seed`, `rm.key` and so on.
            params: the flattened configuration, for example `train.lr`; `train.log10_lr` is added to it.
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
            params=texts(params),
            parent_uid=parent_uid,
            tracking_uri=tracking_address(directory),
        )
        if "train.lr" in params:
            record.params["train.log10_lr"] = f"{math.log10(float(params['train.lr'])):.4f}"
        if uid is not None:
            record.uid = uid
        tracker = cls(record, directory, resume=uid is not None)
        if loggers:
            tracker._log_also(loggers, params)
        return tracker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.end("FINISHED")
        else:
            self.end("FAILED" if issubclass(kind, Exception) else "KILLED")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._tell({"kind": "set_tags", "tags": texts(tags)})

    def set_experiment_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the whole experiment."""
        self._tell({"kind": "experiment_tags", "tags": dict(tags)})

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Set numbers of the run as a whole, for example a matrix's summary. A number that is not finite is left out.

        A name without a group is in `summary/`. Told again at the same step, the last value holds.
        """
        finite = {metric_name("summary", name): float(value) for name, value in values.items() if math.isfinite(value)}
        self._tell({"kind": "metrics", "values": finite, "step": step, "time_ms": time.time_ns() // 1_000_000})

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Keep a table as the artifact `<name>.json`, in the form of `mlflow.log_table`; replaces one of this name.

        Args:
            rows: numbers, texts, booleans and None by column; a column that a row lacks is empty there.
            name: without suffix, for example `arms`.

        Raises:
            TypeError: a value is none of these.
        """
        self._tell({"kind": "table", "name": name, **plain_table(rows)})

    def log_dataset(self, name: str, fingerprint: str, source: str, num_rows: int) -> None:
        """Name a data set as the run's input.

        Args:
            name: shown in MLflow's run table, for example `train`.
            fingerprint: content digest; its first 36 characters are MLflow's digest, all of it is in the profile.
            source: path or address the rows came from.
            num_rows: number of preference pairs.
        """
        event = {"name": name, "fingerprint": fingerprint, "source": source, "num_rows": num_rows}
        self._tell({"kind": "dataset", **event})

    def log_file(self, path: Path, folder: str) -> None:
        """Keep a copy of the file `path` in `folder` of the run's artifacts ("" for the top)."""
        self._tell({"kind": "file", "path": _existing(path), "folder": folder})

    def watch_machine(self) -> None:
        """Send how busy this machine is (processor, memory, disk, network), every 10 seconds until the end.

        Only while MLflow answers: it is not written down for later.
        """
        self._submit(lambda: self._opened().watch_machine())

    def describe(self, note: str) -> None:
        """Set the run's description: Markdown by `rmcore.reporting.html.note`, with links to files of the run."""
        self._tell({"kind": "note", "text": note})

    def describe_experiment(self, note: str) -> None:
        """Set the description of the whole experiment, which its page shows above its runs."""
        self.set_experiment_tags({NOTE_TAG: note})

    def log_artifact_folder(self, folder: Path, stage: str) -> None:
        """Send what the stage's artifact at `folder` holds: summary metrics, figures, tables, metrics by step.

        Lines of `metrics.jsonl` that were followed already are not sent again. Summary metrics are recorded one step
        after the last line. Works the same for an artifact that was found in the store.

        Raises:
            StoreError: there is no such folder.
        """
        self._tell({"kind": "folder", "path": _existing(folder), "stage": stage})

    def register_model(
        self,
        checkpoint: Path,
        *,
        name: str,
        key: str,
        gate: Sequence[Mapping[str, Any]],
        readiness: Mapping[str, Any] | None,
        verdict: Verdict,
        next_rung: NextRung | None,
        note: str,
    ) -> str | None:
        """Put a checkpoint into MLflow's registry as `name`: a pyfunc model (prompt, response) -> reward. Waits.

        Its version gets the aliases that its evidence allows (tasks/model_versions.py). A `key` that is registered
        already gets no second version, only fresh tags, aliases and description.

        Args:
            checkpoint: Hugging Face folder.
            name: registered model's name.
            key: store key of the checkpoint's artifact.
            gate: checks with `name`, `passed` and `text`; each becomes a tag `rm.gate.<name>`.
            readiness: record of the original score, or None; its numbers and texts become tags
                `rm.original_score.<name>`.
            verdict: see rmcore.policy.readiness.verdict, whose `verdict_tags` it becomes.
            next_rung: what would raise it.
            note: the version's description, as `describe` takes it.

        Returns:
            The version, or None when MLflow does not answer (`rm-opt sync` registers it later).

        Raises:
            StoreError: there is no such checkpoint.
        """
        event = {"kind": "model", "checkpoint": _existing(checkpoint), "name": name, "key": key, "note": note}
        tags = judgement_tags(gate, readiness, verdict, next_rung)
        version = self._tell({**event, "tags": tags, "moves": alias_moves(verdict)}).result()
        return None if version is None else str(version)

    def confirm_model(self, key: str, verdict: Verdict) -> None:
        """Say of what is registered under the `key` of a training what serving it has shown: a verdict of rung 4.

        Gained, it gets the alias `confirmed`; lost, it loses `ready` and `confirmed`. What is not registered stays so.
        """
        self._tell({"kind": "confirmation", "key": key, "tags": confirmation_tags(verdict)})

    @contextmanager
    def follow(self, path: Path) -> Iterator[None]:
        """Send the lines that the metrics file `path` gains inside the `with` block, every few seconds.

        The file may not exist yet, and its folder may be renamed meanwhile.
        """
        self.record.events.append({"kind": "follow", "path": str(Path(path).resolve())})
        growing = GrowingFile(Path(path))
        stop = threading.Event()

        def send() -> None:
            if lines := growing.new_lines():
                give_lines(lines, self._logger)
                event = {"kind": "send_lines", "lines": lines, "source": growing.path}
                self._submit(lambda: self._opened().apply(event))

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
        begun = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        folder = self._directory / "loggers" / f"{self.record.run_name}-{begun}"
        study, run = self.record.study, self.record.run_name
        try:
            opened = open_loggers(loggers, study=study, run=run, folder=folder, config=params)
            self._logger = self._loggers.enter_context(opened)
        except RmcoreError:
            self.end("FAILED")
            raise
        self.logger_folder = folder

    def end(self, status: Status = "FINISHED") -> None:
        """Close the run: waits until everything is sent (or written down as unsynced).

        A run that could not take something it was told is never FINISHED: that would make it complete.
        """
        if status == "FINISHED" and any(result.exception() for result in self._results):
            status = "FAILED"
        self._loggers.close()
        self._tell({"kind": "end", "status": status, "ended_ms": time.time_ns() // 1_000_000})
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
    def comparison_url(self) -> str | None:
        """Address of MLflow's table of the cells of the published matrix; None without MLflow or `publish_view`."""
        return self._comparison(charts=False)

    @property
    def comparison_charts_url(self) -> str | None:
        """Address of MLflow's charts of the same cells; None without MLflow or `publish_view`."""
        return self._comparison(charts=True)

    @property
    def pending(self) -> bool:
        """Whether MLflow failed, so that this run waits for `rm-opt sync`."""
        return self._offline.is_set()

    def _comparison(self, *, charts: bool) -> str | None:
        page = self._experiment_page()
        if page is None or self.matrix_key is None or self.pending:
            return None
        return comparison_url(page, self.matrix_key, charts=charts)

    def _experiment_page(self) -> str | None:
        if self.run_id is None or self._run is None:
            return None
        uri = self.record.tracking_uri
        server = without_login(uri).rstrip("/") if uri.startswith("http") else f"http://127.0.0.1:{MLFLOW_PORT}"
        return f"{server}/#/experiments/{self._run.experiment_id}"

    def _open(self) -> None:
        self._run = MlflowRun(self.record, self._directory, self.record.tracking_uri, resume=self._resume)

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

    def _tell(self, event: Event) -> "Future[Any]":
        self.record.events.append(event)
        return self._submit(lambda: self._opened().apply(event))

    def _submit(self, action: Callable[[], Any]) -> "Future[Any]":
        result = self._thread.submit(self._attempt, action)
        self._results.append(result)
        return result

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """Run `action` unless MLflow has failed before; whatever MLflow misses is in the saved record."""
        if not self._offline.is_set():
            try:
                return action()
            except RmcoreError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, hours of computation must not end for it
                self._offline.set()
                logger.warning(
                    "MLflow at %s failed (%s): the run continues without it, its metrics are on disk and its record is "
                    "%s. Run `rm-opt sync` when MLflow is back.",
                    without_login(self.record.tracking_uri),
                    in_one_line(error),
                    self.record.path(self._directory),
                )
        try:
            self.record.save(self._directory)
        except OSError as error:  # a full disk, above all; what was computed must not be lost with it
            if not self._unsaved:
                self._unsaved = True
                logger.warning(
                    "The record of run %s cannot be written (%s), so MLflow may never get what it has missed. The "
                    "outcomes are in the store: make room, and run the same command again, which computes nothing "
                    "twice and sends them.",
                    self.record.run_name,
                    in_one_line(error),
                )
        return None


def _existing(path: Path) -> str:
    if not Path(path).exists():
        raise StoreError(f"{path} does not exist: it was never written, or was removed. Run the stage again.")
    return str(Path(path).resolve())
