"""One MLflow run: the only module that uses MLflow (registered_model.py is the code that MLflow itself runs).

Everything goes through `MlflowClient` with an explicit run id, never through MLflow's global "active run". MLflow is
imported by the first use: its import takes 2 s, its first connection to a new database 5 s.
"""

import json
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rmcore
from rmcore.files import exclusive
from rmcore.tracking import METRICS_FILE
from tasks.run_record import Event, MetricRow, RunRecord, parse_metric_lines, summary_metrics

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

PROBE_TIMEOUT_S = 5.0
MAX_METRICS_PER_CALL = 1000
MAX_PARAMS_PER_CALL = 100
"""MLflow's own limits of one log_batch call."""
UID_TAG = "rm.run_uid"
MODEL_REQUIREMENTS = ("mlflow", "torch", "transformers", "safetensors", "pydantic", "numpy", "pandas", "jinja2")
"""What a registered model needs to be served elsewhere; named, because MLflow's own guess would import torch here."""


def outages() -> tuple[type[Exception], ...]:
    """What MLflow raises when it cannot be reached or cannot store (requests' errors are OSErrors)."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, OSError)


def connect(tracking_uri: str) -> "MlflowClient":
    """A client of `tracking_uri`; a server is asked for a sign of life first, so a dead address costs seconds.

    Raises:
        OSError: no server answers there.
    """
    if tracking_uri.startswith("http"):
        import requests

        # urllib3 reports each retry by itself; an outage is told once, below.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        requests.get(f"{tracking_uri}/health", timeout=PROBE_TIMEOUT_S)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri, registry_uri=tracking_uri)


class MlflowRun:
    """One MLflow run: applies events to it, and raises what MLflow raises. Used by one thread."""

    def __init__(self, record: RunRecord, directory: Path, tracking_uri: str, *, resume: bool) -> None:
        self.client = connect(tracking_uri)
        self.directory = directory
        self.experiment_id = self._experiment(record.study, tracking_uri)
        found = self._find(record.uid) if resume else None
        self._resumed = found is not None
        run = found or self.client.create_run(
            self.experiment_id,
            start_time=record.started_ms,
            run_name=record.run_name,
            tags={**record.tags, UID_TAG: record.uid},
        )
        self.run_id: str = run.info.run_id
        self._sent_lines: set[bytes] = set()
        self._next_step = 0
        self._send_params(record.params)

    def _experiment(self, study: str, tracking_uri: str) -> str:
        """Id of the experiment `rm/<study>`, made where missing and restored where deleted."""
        name = f"rm/{study}"
        # A server knows its own artifact root; MLflow's default for a bare database is the current folder.
        artifacts = self.directory / "mlflow" / "artifacts" / study
        location = None if tracking_uri.startswith("http") else artifacts.as_uri()
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            with tolerating("RESOURCE_ALREADY_EXISTS"):  # another run may be faster
                return str(self.client.create_experiment(name, artifact_location=location))
            return self._experiment(study, tracking_uri)
        if experiment.lifecycle_stage == "deleted":
            self.client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    def _find(self, uid: str) -> "Run | None":
        runs = self.client.search_runs([self.experiment_id], f"tags.`{UID_TAG}` = '{uid}'", max_results=1)
        return runs[0] if runs else None

    def _send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        entities = [Param(name, value) for name, value in params.items()]
        for start in range(0, len(entities), MAX_PARAMS_PER_CALL):
            self.client.log_batch(self.run_id, params=entities[start : start + MAX_PARAMS_PER_CALL])

    def apply(self, event: Event) -> Any:
        """Do what `event` says; its "kind" names the method."""
        details = {name: value for name, value in event.items() if name != "kind"}
        return getattr(self, event["kind"])(**details)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        from mlflow.entities import RunTag

        self.client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])

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
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        points = [(name, value, step) for step, values in rows for name, value in values.items()]
        if self._resumed:
            known = self._known({name for name, _, _ in points})
            points = [point for point in points if point[1:] not in known[point[0]]]
        metrics = [Metric(name, value, now_ms, step) for name, value, step in points]
        for start in range(0, len(metrics), MAX_METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MAX_METRICS_PER_CALL])

    def _known(self, names: set[str]) -> dict[str, set[tuple[float, int]]]:
        known: dict[str, set[tuple[float, int]]] = defaultdict(set)
        for name in names:
            known[name] = {(point.value, point.step) for point in self.client.get_metric_history(self.run_id, name)}
        return known

    def end(self, status: str, ended_ms: int) -> None:
        """Set the run's final status and end time."""
        self.client.set_terminated(self.run_id, status, ended_ms)

    def model(self, checkpoint: str, name: str, key: str, tags: Mapping[str, str], ready: bool) -> str:
        """Register a checkpoint once per key, set its tags and aliases, link it to this run; return its version."""
        from mlflow.entities import LoggedModelOutput

        with exclusive(self.directory / "mlflow" / "register.lock"):
            version = self._version_of(name, key) or self._new_version(checkpoint, name, key)
            for tag, text in tags.items():
                self.client.set_model_version_tag(name, version.version, tag, text)
            self.client.set_registered_model_alias(name, "candidate", version.version)
            if ready:
                self.client.set_registered_model_alias(name, "ready", version.version)
            elif "ready" in self.client.get_model_version(name, version.version).aliases:
                self.client.delete_registered_model_alias(name, "ready")
        model_id = version.tags["rm.model_id"]
        outputs = self.client.get_run(self.run_id).outputs
        if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(model_id, step=0)])
        self.set_tags({"rm.model": f"models:/{name}/{version.version}"})
        return str(version.version)

    def _version_of(self, name: str, key: str) -> "ModelVersion | None":
        found = self.client.search_model_versions(f"name = '{name}' and tags.`rm.key` = '{key}'", max_results=1)
        return found[0] if found else None

    def _new_version(self, checkpoint: str, name: str, key: str) -> "ModelVersion":
        with tolerating("RESOURCE_ALREADY_EXISTS"):
            self.client.create_registered_model(name)
        logged = self.client.create_logged_model(
            self.experiment_id, name=name, source_run_id=self.run_id, tags={"rm.key": key}, model_type="reward-model"
        )
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            save_reward_model(folder, Path(checkpoint), run_id=self.run_id, logged_model=logged)
            self.client.log_model_artifacts(logged.model_id, str(folder))
        self.client.finalize_logged_model(logged.model_id, "READY")
        # The logged model's own folder, with its id, is the one local path that a server accepts as source;
        # `models:/<id>` would be looked up at MLflow's global address instead of this client's.
        return self.client.create_model_version(
            name,
            source=logged.artifact_location,
            run_id=self.run_id,
            model_id=logged.model_id,
            tags={"rm.key": key, "rm.model_id": logged.model_id},
        )


def save_reward_model(folder: Path, checkpoint: Path, *, run_id: str, logged_model: Any) -> None:
    """Write `checkpoint` with rmcore's code as an MLflow pyfunc folder: (prompt, response) strings to a reward.

    The caller holds a lock: MLflow hands the model from code over through a global variable.
    """
    import pandas as pd
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types.schema import ColSpec, Schema

    save_model(
        folder,
        python_model=str(Path(__file__).with_name("registered_model.py")),
        artifacts={"checkpoint": str(checkpoint)},
        code_paths=[str(Path(rmcore.__file__).parent)],
        signature=ModelSignature(
            inputs=Schema([ColSpec("string", "prompt"), ColSpec("string", "response")]),
            outputs=Schema([ColSpec("double", "reward")]),
        ),
        input_example=pd.DataFrame({"prompt": ["What is 2 + 3?"], "response": ["2 + 3 is 5."]}),
        # A local build such as 2.13.0+cpu is on no package index.
        pip_requirements=[f"{name}=={installed_version(name).partition('+')[0]}" for name in MODEL_REQUIREMENTS],
        mlflow_model=Model(
            artifact_path=logged_model.artifact_location,
            model_uuid=logged_model.model_id,
            model_id=logged_model.model_id,
            run_id=run_id,
        ),
    )


@contextmanager
def tolerating(error_code: str) -> Iterator[None]:
    """Swallow MLflow's answer `error_code`, and nothing else."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != error_code:
            raise
