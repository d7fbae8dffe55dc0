"""Tracking that never slows a run down and never stops it.

What a `RunTracker` is told becomes its `RunRecord`, and one background thread, the only one that uses MLflow, makes the
run there equal to it (tasks/projection.py): importing and connecting happen while the run continues. Where MLflow
fails, that is said once; at its end the run is completed, and else later by `rm-opt store sync`, from the record in
`$RM_OPT_HOME/unsynced/`. Call `tasks.home.configure_environment` first.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import StoreError
from rmcore.core.processes import this_process
from tasks.comparison_view import ADDRESS_PARAMETER, comparison_url
from tasks.home import MLFLOW_PORT, home, tracking_address
from tasks.mlflow_client import in_one_line, without_login
from tasks.model_versions import alias_moves, judgement_tags
from tasks.projection import MlflowRun, end_dead_runs
from tasks.run_record import RunRecord, Status, compared_settings, read_numbers, texts

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 3.0


class RunTracker:
    """One MLflow run, fed from any thread without waiting. Close it with `end`, or use it in a `with` statement."""

    def __init__(self, record: RunRecord, directory: Path) -> None:
        self.record = record
        """All that was told; a new one after each telling."""
        self.pending = False
        """Whether MLflow lacks something of this run, so that it waits for `rm-opt store sync`."""
        self._directory = directory
        self._saved: RunRecord | None = None
        self._run: MlflowRun | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._opened = self._next = self._thread.submit(self._send)
        self._thread.submit(self._end_dead_runs)

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
    ) -> Self:
        """Open a run `run_name` in the experiment `rm/<study>` at `$MLFLOW_TRACKING_URI`; returns at once.

        With a `uid` that MLflow knows in that experiment, a FINISHED run with the same tag `rm.key` is complete and
        gets nothing but tags, whatever it is told; else a new run is made, which replaces any other when it ends
        FINISHED. So give `rm.key` here if the outcome is known, and set it as a tag later if it is still to be
        computed.

        Args:
            study: name of the study.
            run_name: shown in MLflow's run table.
            tags: `rm.kind`, `rm.seed`, `rm.key` and so on.
            params: the settings. Of a whole configuration, those by which runs are compared and those that are not the
                defaults become parameters (`compared_settings`); all of it is the artifact `settings.yaml`.
            also: names of settings that become parameters, too.
            uid: any text without quotes that names the run for ever; None: a new run each time.
            parent_uid: uid of the run that this one becomes a child of, started before or after it.
        """
        directory, settings = home(), params.model_dump(mode="json") if isinstance(params, PipelineConfig) else None
        record = RunRecord(
            study=study,
            run_name=run_name,
            tags={"rm.study": study, **texts(tags)},
            params=texts(compared_settings(params, also) if isinstance(params, PipelineConfig) else params),
            parent_uid=parent_uid,
            tracking_uri=tracking_address(directory),
            owner=this_process(),
            settings=settings,
        )
        return cls(record if uid is None else replace(record, uid=uid), directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end("FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED")

    def tell(self, **changes: Any) -> "Future[None]":
        """Set fields of the run's record (`RunRecord` says what each means); entries of a mapping join those it has.

        Returns what is done when they are sent, or MLflow is found to be away.
        """
        for name, new in changes.items():
            if isinstance(new, dict):
                changes[name] = {**(getattr(self.record, name) or {}), **new}
        self.record = replace(self.record, **changes)
        return self._update()

    def log_artifact_folder(self, folder: Path, stage: str) -> None:
        """Send what the stage's artifact at `folder` holds: headline numbers, figures, tables, curves.

        Works the same for an artifact that was found in the store.

        Raises:
            StoreError: there is no such folder.
            DataError: its numbers are damaged.
        """
        if not folder.is_dir():  # here and not in the thread, which would take it for an outage of MLflow
            raise StoreError(f"{folder} does not exist: it was never written, or was removed. Run the stage again.")
        read_numbers(folder, stage)  # what is damaged ends the run here rather than in the thread
        self.tell(folders={str(folder.resolve()): stage})

    def register_model(self, checkpoint: Path, *, name: str, key: str, note: str, **judged: Any) -> str | None:
        """Put a checkpoint into MLflow's registry as `name`: a pyfunc model (prompt, response) -> reward. Waits.

        Its version gets the tags and aliases that its evidence allows: `judged` are the arguments of `judgement_tags`.
        A `key` (of the checkpoint's artifact) that is registered already gets no second version, only fresh tags,
        aliases and note.

        Returns:
            The version, or None when MLflow does not answer (`rm-opt store sync` registers it later).
        """
        evidence = {"tags": judgement_tags(**judged), "moves": alias_moves(judged["verdict"])}
        self.tell(model={"checkpoint": str(checkpoint), "name": name, "key": key, "note": note, **evidence}).result()
        return None if self._run is None or self.pending else self._run.version

    @contextmanager
    def follow(self, path: Path) -> Iterator[None]:
        """Send the lines that the metrics file `path` gains inside the `with` block, every few seconds.

        The file may not exist yet.
        """
        self.tell(curves=[*self.record.curves, str(path.resolve())])
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(FOLLOW_SECONDS):
                self._update()

        looker = threading.Thread(target=look, name="metrics-follower", daemon=True)
        looker.start()
        try:
            yield
        finally:
            stop.set()
            looker.join()
            self._update()

    def end(self, status: Status = "FINISHED") -> None:
        """Close the run: waits until everything is sent (or written down as unsynced)."""
        self.record = replace(self.record, status=status, ended_ms=time.time_ns() // 1_000_000)
        self._thread.submit(self._finish).result()
        self._thread.shutdown()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None when MLflow does not answer. Waits for the connection."""
        self._opened.result()
        return self._run.run_id if self._run else None

    @property
    def url(self) -> str | None:
        """Address of the run in MLflow's UI (for a database file: where `rm-opt up` serves it); None without MLflow."""
        page = self._experiment_page()
        return None if page is None else f"{page}/runs/{self.run_id}?{ADDRESS_PARAMETER}"

    def comparison(self, key: str, *, charts: bool = False) -> str | None:
        """Address of MLflow's table (or charts) of the view `key` of the experiment; None without MLflow."""
        page = self._experiment_page()
        return None if page is None or self.pending else comparison_url(page, key, charts=charts)

    def _experiment_page(self) -> str | None:
        if self.run_id is None or self._run is None:
            return None
        uri = self.record.tracking_uri
        server = without_login(uri).rstrip("/") if uri.startswith("http") else f"http://127.0.0.1:{MLFLOW_PORT}"
        return f"{server}/#/experiments/{self._run.experiment_id}"

    def _update(self) -> "Future[None]":
        """Let the thread send what it has not sent; what is told before it begins goes with it."""
        if self._next.running() or self._next.done():
            self._next = self._thread.submit(self._send)
        return self._next

    def _send(self) -> None:
        """Make the run in MLflow equal to the record, unless MLflow is away."""
        record = self.record
        if record.status is None and record is not self._saved:
            self._saved = record
            with suppress(OSError):  # a full disk: what is missing at the end is told there
                record.save(self._directory)
        if self.pending:
            return
        try:
            self._run = self._run or MlflowRun(record, self._directory)
            self._run.send(record)
            if record.is_watched and record.status is None:
                self._run.watch_machine()
        except Exception as error:  # noqa: BLE001 - whatever it is, hours of computation must not end for it
            self.pending = True
            logger.warning(
                "MLflow at %s failed (%s): run %s continues without it, its metrics are on disk and its record is %s. "
                "All of it is sent at the end of the run, or by `rm-opt store sync` when MLflow is back.",
                *(without_login(record.tracking_uri), in_one_line(error), record.run_name),
                record.path(self._directory),
            )

    def _end_dead_runs(self) -> None:
        if not self.pending:
            end_dead_runs(self._directory, self.record.tracking_uri)

    def _finish(self) -> None:
        """Send all at the end; after an outage, what MLflow has missed, if it answers again; else the record waits."""
        self._send()
        if self.pending:
            if self._run is not None:
                self._run.stop_watching()
            try:
                self._run = MlflowRun(self.record, self._directory)
                self._run.send(self.record, is_last=True)
            except Exception as error:  # noqa: BLE001 - as in `_send`, which told the outage
                logger.debug("MLflow is still away: %s", in_one_line(error))
                try:
                    self.record.save(self._directory)
                except OSError as full:  # a full disk, above all; what was computed must not be lost with it
                    logger.warning(
                        "The record of run %s cannot be written (%s), so MLflow may never get what it has missed. The "
                        "outcomes are in the store: make room, and run the same command again, which sends them.",
                        *(self.record.run_name, in_one_line(full)),
                    )
                return
            self.pending = False
            if not self._run.missing:
                logger.warning("MLflow answers again and has all of run %s.", self.record.run_name)
        self.record.path(self._directory).unlink(missing_ok=True)
