"""Tracking that never slows a run down and never stops it.

Each call of a `RunTracker` is written down in a `RunRecord` and handed to one background thread, the only one that
uses MLflow (tasks/mlflow_run.py): importing and connecting happen beside the run, and order is kept. When MLflow
fails, that is said once, the record goes to `$RM_OPT_HOME/unsynced/`, and `sync_pending` (`rm-opt sync`) sends it
later. Call `tasks.home.configure_environment` first.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rmcore.errors import ServiceError, StoreError
from rmcore.files import exclusive
from tasks.home import MLFLOW_PORT, default_tracking_uri, home
from tasks.mlflow_run import MlflowRun, outages
from tasks.run_record import Event, GrowingFile, RunRecord, read_record, unsynced_folder

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 3.0
MAX_VALUE_CHARS = 5000
"""MLflow refuses tags over 8,000 and version tags over 5,000 characters."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class RunTracker:
    """One MLflow run, fed from any thread without waiting. Close it with `end`, or use it in a `with` statement."""

    def __init__(self, record: RunRecord, directory: Path) -> None:
        self.record = record
        self._directory = directory
        self._offline = threading.Event()
        self._run: MlflowRun | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._results: list[Future[Any]] = []
        self._submit(self._open)

    @classmethod
    def start(cls, study: str, run_name: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> Self:
        """Open a run `run_name` in the experiment `rm/<study>` at `$MLFLOW_TRACKING_URI`; returns at once.

        Args:
            study: name of the study.
            run_name: shown in MLflow's run table.
            tags: as in DESIGN: `rm.kind`, `rm.seed`, `rm.key` and so on.
            params: the flattened configuration, for example `train.lr`; `train.log10_lr` is added to it.
        """
        directory = home()
        record = RunRecord(
            study=study,
            run_name=run_name,
            tags={"rm.study": study, **_texts(tags)},
            params=_texts(params),
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or default_tracking_uri(directory),
        )
        if "train.lr" in params:
            record.params["train.log10_lr"] = f"{math.log10(float(params['train.lr'])):.4f}"
        return cls(record, directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.end("FINISHED")
        else:
            self.end("FAILED" if issubclass(kind, Exception) else "KILLED")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._tell({"kind": "set_tags", "tags": _texts(tags)})

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
        readiness: Mapping[str, Any],
        verdict: Mapping[str, Any],
    ) -> str | None:
        """Put a checkpoint into MLflow's registry as `name`: a pyfunc model (prompt, response) -> reward. Waits.

        The alias `candidate` moves to its version; `ready` only if every check of the gate passed and the verdict is
        "ready" (a version that is no longer ready loses it). A `key` that is registered already gets no second
        version, only fresh tags and aliases.

        Args:
            checkpoint: Hugging Face folder.
            name: registered model's name.
            key: store key of the checkpoint's artifact.
            gate: checks with `name`, `passed` and `text`; each becomes a tag `rm.gate.<name>`.
            readiness: the readiness record; its numbers and texts become tags `rm.readiness.<name>`.
            verdict: `status`, `headline` and `reasons`; become the tags `rm.verdict`, `rm.headline` and `rm.reasons`.

        Returns:
            The version, or None when MLflow does not answer (`rm-opt sync` registers it later).

        Raises:
            StoreError: there is no such checkpoint.
        """
        tags = {
            "rm.verdict": verdict["status"],
            "rm.headline": verdict["headline"],
            "rm.reasons": "; ".join(verdict["reasons"]) or "none",
            **{f"rm.gate.{check['name']}": f"{_passed(check['passed'])}: {check['text']}" for check in gate},
            **{
                f"rm.readiness.{part}": value
                for part, value in readiness.items()
                if isinstance(value, int | float | str)
            },
        }
        ready = verdict["status"] == "ready" and all(check["passed"] for check in gate)
        event = {"kind": "model", "checkpoint": _existing(checkpoint), "name": name, "key": key}
        version = self._tell({**event, "tags": _texts(tags), "ready": ready}).result()
        return None if version is None else str(version)

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

    def end(self, status: Status = "FINISHED") -> None:
        """Close the run: waits until everything is sent (or written down as unsynced)."""
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
        if self.run_id is None or self._run is None:
            return None
        uri = self.record.tracking_uri
        server = uri.rstrip("/") if uri.startswith("http") else f"http://127.0.0.1:{MLFLOW_PORT}"
        return f"{server}/#/experiments/{self._run.experiment_id}/runs/{self.run_id}"

    @property
    def pending(self) -> bool:
        """Whether MLflow failed, so that this run waits for `rm-opt sync`."""
        return self._offline.is_set()

    def _open(self) -> None:
        self._run = MlflowRun(self.record, self._directory, self.record.tracking_uri, resume=False)

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
            except outages() as error:
                self._offline.set()
                logger.warning(
                    "MLflow at %s failed (%s): the run goes on without it, its metrics are on disk and its record is "
                    "%s. Run `rm-opt sync` when MLflow is back.",
                    self.record.tracking_uri,
                    _first_line(error),
                    self.record.path(self._directory),
                )
        self.record.save(self._directory)
        return None


def sync_pending(directory: Path, tracking_uri: str | None = None) -> list[str]:
    """Send every run that waits in `directory/unsynced/` to MLflow; names of the runs sent.

    Safe to repeat: a run that MLflow knows in part is completed, not duplicated. Files that are gone from the store
    meanwhile are named in a warning and left out.

    Args:
        directory: the home that holds the records.
        tracking_uri: where to send them; default: the address each run was meant for.

    Raises:
        ServiceError: MLflow still fails; the runs not sent yet stay.
    """
    sent: list[str] = []
    failures: list[str] = []
    with exclusive(directory / "unsynced.lock"):
        waiting = sorted(unsynced_folder(directory).glob("*.json"))
        for path in waiting:
            record = read_record(path)
            target = tracking_uri or record.tracking_uri
            try:
                _replay(record, directory, target)
            except outages() as error:
                failures.append(f"{record.run_name} to {target}: {_first_line(error)}")
                continue
            path.unlink()
            sent.append(record.run_name)
    if failures:
        raise ServiceError(
            f"MLflow still fails for {len(failures)} of {len(waiting)} waiting runs ({'; '.join(failures[:3])}); they "
            f"stay in {unsynced_folder(directory)}, {len(sent)} were sent. Start MLflow (`rm-opt up` for the local "
            "one) and run `rm-opt sync` again, with --to ADDRESS if it has moved."
        )
    return sent


def _replay(record: RunRecord, directory: Path, tracking_uri: str) -> None:
    run = MlflowRun(record, directory, tracking_uri, resume=True)
    for event in record.events:
        needed = event.get("path") or event.get("checkpoint")
        if needed is None or Path(needed).exists():
            run.apply(event)
        elif event["kind"] != "follow":  # a followed file has usually moved into its artifact folder
            logger.warning(
                "%s is gone, so run %s goes to MLflow without it. Run the pipeline again to make it anew.",
                needed,
                record.run_name,
            )


def _passed(passed: bool) -> str:
    return "passed" if passed else "failed"


def _existing(path: Path) -> str:
    if not Path(path).exists():
        raise StoreError(f"{path} does not exist: it was never written, or was removed. Run the stage again.")
    return str(Path(path).resolve())


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value)[:MAX_VALUE_CHARS] for name, value in values.items()}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else type(error).__name__
