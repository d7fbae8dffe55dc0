"""Runs reach MLflow completely and once: by database file, by server, and after an outage."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import pipeline
from machine import largest_file, wait_for
from rmcore.core.errors import DataError, ServiceError, StoreError
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from tasks import home as home_module
from tasks import tracking
from tasks.mlflow_client import connect
from tasks.model_versions import confirmation_tags
from tasks.projection import sync_pending
from tasks.run_record import metric_name, read_record, unsynced_folder
from tasks.tracking import RunTracker

pytestmark = pytest.mark.services

GATE_PASSED = {
    "gate": [{"name": "pairwise_accuracy", "value": 0.71, "threshold": 0.6, "passed": True, "text": "above 0.6"}],
    "readiness": {"overall_score": 0.85, "recommendations": []},
    "verdict": {"rung": 3, "evidence": "samples", "status": "ready", "headline": "Ready", "reasons": []},
    "next_rung": {"rung": 4, "evidence": "a policy", "command": "rm-opt rlhf", "cost": "hours"},
    "note": "### Ready\n\n[Report](run:report/report.html)\n",
}
GATE_FAILED = {
    **GATE_PASSED,
    "gate": [
        *GATE_PASSED["gate"],
        {"name": "ece", "value": 0.4, "passed": False, "text": "ECE: 0.400, not below 0.15"},
        {"name": "gap", "value": 15.2, "passed": False, "unclear": True, "text": "gap: 15.2 points, not below 15"},
    ],
    "verdict": {**GATE_PASSED["verdict"], "status": "not_ready"},
}
ON_LABELS = {**GATE_PASSED, "verdict": {**GATE_PASSED["verdict"], "rung": 1, "status": "passes"}}
FAILED_LABELS = {**GATE_PASSED, "verdict": {**GATE_PASSED["verdict"], "rung": 1, "status": "fails"}}


def write_steps(path: Path, steps) -> None:
    writer = JsonlTracker(path)
    for step in steps:
        curves = {"train/loss": 1.0 / (step + 1), "train/lr": 1e-3, "eval/loss": float("nan"), "eval/tie_rate": 0.1}
        writer.metrics(step, curves)
    writer.close()


def start(name: str = "seed 0") -> RunTracker:
    return RunTracker.start("demo", name, {"rm.kind": "pipeline", "rm.seed": "0"}, {"train.lr": 0.001, "seed": 0})


def history(client, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def only_run(client):
    """The one run of the study; fails when there are none or several."""
    experiment = client.get_experiment_by_name("rm/demo")
    [run] = client.search_runs([experiment.experiment_id])
    return run


def assert_complete(client, artifact: Path, num_steps: int = 3) -> None:
    run = only_run(client)
    assert run.info.status == "FINISHED"
    assert run.data.tags["rm.study"] == "demo"
    assert run.data.tags["rm.verdict"] == "ready"
    assert history(client, run.info.run_id, "train/loss") == [(step, 1.0 / (step + 1)) for step in range(num_steps)]
    assert history(client, run.info.run_id, "eval/test_pairwise_accuracy") == [(num_steps, 0.7)]
    assert set(run.data.metrics) == {"train/loss", "train/lr", "eval/test_pairwise_accuracy"}  # the headline alone
    assert run.data.tags["interval/test_pairwise_accuracy"] == "0.6 to 0.8"
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "numbers.json")).read_text())
    numbers = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert {row["metric"]: row["value"] for row in numbers} == {
        "eval/test_pairwise_accuracy": 0.7,
        "eval/test_brier": 0.2,
    }
    files = {file.path for file in client.list_artifacts(run.info.run_id, "evaluate/figures")}
    assert files == {"evaluate/figures/curve.png"}


def tell_everything(tracker: RunTracker, artifact: Path) -> None:
    tracker.log_artifact_folder(artifact, "evaluate")
    tracker.tell(tags={"rm.verdict": "ready"})


def test_followed_lines_are_sent_once_though_the_folder_moves(home, artifact, tmp_path):
    unfinished = tmp_path / "wip" / METRICS_FILE
    with start() as tracker:
        with tracker.follow(unfinished):
            write_steps(unfinished, range(2))
            tracker._update().result()  # MLflow takes the same point once if it comes twice in one request
            (artifact / METRICS_FILE).write_bytes(unfinished.read_bytes())
            write_steps(artifact / METRICS_FILE, [2])
        tell_everything(tracker, artifact)
        assert tracker.url.startswith("http://127.0.0.1:5000/#/experiments/")
    assert_complete(connect(os.environ["MLFLOW_TRACKING_URI"]), artifact)
    assert not tracker.pending
    assert not list(unsynced_folder(home).iterdir())


def test_lines_are_sent_while_a_stage_runs_and_what_one_look_cannot_read_by_the_next_one(
    home, tmp_path, monkeypatch, caplog
):
    """As a network file system fails for a moment; here a folder has the file's name. The last line is half written."""
    monkeypatch.setattr(tracking, "FOLLOW_SECONDS", 0.001)
    path, client = tmp_path / METRICS_FILE, connect(os.environ["MLFLOW_TRACKING_URI"])
    path.mkdir()
    with start() as tracker, tracker.follow(path):
        tracker._update().result()
        path.rmdir()
        write_steps(path, range(2))
        with path.open("a") as file:
            file.write('{"step": 2, "metr')
        wait_for(lambda: history(client, tracker.run_id, "train/loss") == [(0, 1.0), (1, 0.5)])
    assert history(client, only_run(client).info.run_id, "train/loss") == [(0, 1.0), (1, 0.5)]
    assert not caplog.records


def test_metric_names_have_one_slash_and_mlflow_takes_them():
    from mlflow.utils.validation import _validate_metric_name

    names = {"eval/fpr@0.5": "eval/fpr_at_0.5", "num_pairs": "evaluate/num_pairs", "a/b/c": "a/b_c", "a/näh?": "a/n_h_"}
    for name, expected in names.items():
        assert metric_name("evaluate", name) == expected
        _validate_metric_name(expected)


def test_a_server_that_goes_away_loses_nothing_and_is_told_once(home, server, artifact, caplog):
    with caplog.at_level(logging.WARNING):
        tracker = start()
        with tracker.follow(artifact / METRICS_FILE):
            pass  # its lines are sent on leaving
        assert tracker.run_id
        tracker._update().result()
        server.away()
        began = time.monotonic()
        tell_everything(tracker, artifact)
        tracker.end()
        assert time.monotonic() - began < 60
    assert tracker.pending
    assert [record.levelname for record in caplog.records if "rm-opt store sync" in record.getMessage()] == ["WARNING"]

    with pytest.raises(ServiceError, match="still fails for 1 of 1 waiting runs"):
        sync_pending(home)
    assert len(list(unsynced_folder(home).iterdir())) == 1

    server.back()
    (waiting,) = unsynced_folder(home).iterdir()
    record = waiting.read_text()
    assert sync_pending(home) == ["seed 0"]
    assert_complete(connect(server.url), artifact)
    waiting.write_text(record)  # as if the program had died before it removed the record
    sync_pending(home)
    assert_complete(connect(server.url), artifact)
    assert sync_pending(home) == []


def test_an_address_without_a_server_costs_seconds_and_the_model_follows_later(home, monkeypatch, artifact, checkpoint):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    began = time.monotonic()
    with start() as tracker:
        tell_everything(tracker, artifact)
        version = tracker.register_model(checkpoint, name="rm", key="k1", **GATE_PASSED)
        assert (version, tracker.url) == (None, None)
    assert time.monotonic() - began < 60
    monkeypatch.setattr(pipeline, "api_is_embedded", lambda: True)
    assert "rm-opt store sync" in pipeline.own_pages(tracker)["MLflow"]
    database = home_module.default_tracking_uri(home)
    assert sync_pending(home, database) == ["seed 0"]
    assert_complete(connect(database), artifact)
    assert connect(database).get_model_version_by_alias("rm", "ready").version == 1


def test_a_file_gone_before_the_sync_is_named_and_the_rest_sent(home, monkeypatch, artifact, tmp_path, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    report = tmp_path / "report.html"
    report.write_text("<p>")
    with start() as tracker:
        tell_everything(tracker, artifact)
        tracker.tell(files={str(report): ""})
    report.unlink()
    (whole,) = unsynced_folder(home).iterdir()
    for name, content in (
        ("a", b"\xff"),
        ("z", whole.read_bytes().replace(b'"started_ms": ', b'"started_ms": "x", "b": ')),
    ):
        (unsynced_folder(home) / f"{name}.json").write_bytes(content)  # in the way of no other
    database = home_module.default_tracking_uri(home)
    with pytest.raises(DataError, match=r"2 waiting records are damaged, 1 runs were sent\. .*/a\.json .*/z\.json"):
        sync_pending(home, database)
    assert_complete(connect(database), artifact)
    assert f"{report} is gone" in caplog.text
    assert sorted(path.name for path in unsynced_folder(home).iterdir()) == ["a.json", "z.json"]


def test_a_record_that_the_disk_has_no_room_for_ends_no_run(home, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with largest_file(64), start() as tracker:
        tracker.tell(numbers={"eval/a": 0.5})
        tracker.tell(tags={"rm.kind": "cell"})
    assert tracker.pending
    said = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert len(said) == 1
    assert "run the same command again" in said[0]
    assert list(unsynced_folder(home).iterdir()) == []


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a file that stands for weights; enough for the registry, which does not open it."""
    folder = tmp_path / "best"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(os.urandom(1000))
    return folder


def test_registering_twice_makes_one_version_whose_aliases_follow_the_gate(home, server, checkpoint):
    tracker = start()
    client = connect(server.url)

    def register(judged, key="k1"):
        return tracker.register_model(checkpoint, name="rm", key=key, **judged)

    assert register(GATE_PASSED) == "1"
    assert sorted(client.get_model_version("rm", "1").aliases) == ["candidate", "ready"]
    assert register(GATE_FAILED) == "1"
    version = client.get_model_version("rm", "1")
    assert version.aliases == ["candidate"]
    assert version.tags["rm.gate.ece"] == "fail: ECE: 0.400, not below 0.15"
    assert version.tags["rm.gate.gap"] == "undecided: gap: 15.2 points, not below 15"
    assert version.tags["rm.original_score.overall_score"] == "0.85"
    assert version.tags["rm.rung"] == "3"
    assert version.tags["rm.to_raise"] == "a policy: rm-opt rlhf (costs hours)"
    assert register(ON_LABELS) == "1"  # labelled pairs alone make no model ready
    assert sorted(client.get_model_version("rm", "1").aliases) == ["candidate", "passed-labels"]
    assert register(FAILED_LABELS) == "1"
    assert client.get_model_version("rm", "1").aliases == ["candidate"]
    assert register(GATE_PASSED) == "1"
    assert "ready" in client.get_model_version("rm", "1").aliases
    assert register(GATE_PASSED, key="k2") == "2"
    assert client.get_model_version("rm", "1").aliases == []
    assert len(client.search_model_versions("name = 'rm'")) == 2
    assert len(client.search_logged_models([only_run(client).info.experiment_id])) == 2
    register(GATE_PASSED)  # an older version judged again is no newer one
    assert client.get_model_version("rm", "1").aliases == ["ready"]
    assert client.get_model_version("rm", "2").aliases == ["candidate"]
    tracker.end()


def served(status: str) -> dict:
    """A verdict of the fourth rung."""
    return {"rung": 4, "evidence": "best-of-8 served", "status": status, "headline": f"It {status} *", "reasons": []}


def test_what_serving_has_shown_moves_the_aliases_of_the_version_and_outlives_a_weaker_judgement(
    home, server, checkpoint
):
    client = connect(server.url)
    with start() as tracker:
        tracker.register_model(checkpoint, name="rm", key="k1", **GATE_PASSED)

    def found(tracker):
        assert not tracker.pending
        version = client.get_model_version("rm", "1")
        return sorted(version.aliases), version.description.count("level 4 of 4"), version.tags.get("rm.confirmation")

    def confirm(status, key="k1"):
        with start() as tracker:
            tracker.tell(confirmation={"key": key, "tags": confirmation_tags(served(status))})
        return found(tracker)

    def judge_again(judged):
        with start() as tracker:
            tracker.register_model(checkpoint, name="rm", key="k1", **judged)
        return found(tracker)

    assert confirm("lost", key="of another training") == (["candidate", "ready"], 0, None)
    assert confirm("unclear") == (["candidate", "ready"], 1, "unclear")
    assert confirm("gained") == (["candidate", "confirmed", "ready"], 1, "gained")
    assert "optimised against: gained. It gained &#42;" in client.get_model_version("rm", "1").description
    assert judge_again(ON_LABELS) == (["candidate", "confirmed", "passed-labels"], 1, "gained")
    assert confirm("lost") == (["candidate", "passed-labels"], 1, "lost")
    assert confirm("unclear") == (["candidate", "passed-labels"], 1, "lost")  # what was shown stands
    assert judge_again(GATE_PASSED) == (["candidate", "passed-labels"], 1, "lost")  # samples say less than serving
    assert confirm("gained") == (["candidate", "confirmed", "passed-labels"], 1, "gained")
    gained = judge_again({**GATE_PASSED, "verdict": served("gained")})
    assert gained == (["candidate", "confirmed", "passed-labels", "ready"], 0, "gained")


def test_a_run_is_described_and_its_links_lead_to_its_own_files(home):
    with start() as tracker:
        tracker.tell(note="[Report](run:report/report.html) and [another](https://example.org)\n")
        tracker.register_model(home / "mlflow", name="rm", key="k1", **GATE_PASSED)
    client = connect(os.environ["MLFLOW_TRACKING_URI"])
    run = only_run(client)
    place = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}/artifacts/report/report.html"
    expected = f"[Report]({place}) and [another](https://example.org)\n"
    assert run.data.tags["mlflow.note.content"] == expected
    assert client.get_model_version("rm", "1").description == f"### Ready\n\n[Report]({place})\n"
    assert client.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"
    assert tracker.url.endswith(f"/runs/{run.info.run_id}?workflowType=machine_learning")


def pretend_gpu(monkeypatch):
    """One GPU that does not tell its power, as parts of one (MIG) do not."""
    import pynvml

    def no_power(gpu):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    told = {
        "DeviceGetCount": 1,
        "DeviceGetHandleByIndex": "gpu",
        "DeviceGetMemoryInfo": SimpleNamespace(used=1, total=2),
    }
    told |= {"Init": None, "DeviceGetUtilizationRates": SimpleNamespace(gpu=70)}
    for name, value in told.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", lambda *_, value=value: value)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", no_power)


def test_a_missing_artifact_is_an_error_not_an_outage(home, tmp_path):
    with pytest.raises(StoreError, match="does not exist"), start() as tracker:
        tracker.log_artifact_folder(tmp_path / "nowhere", "train")
    assert only_run(connect(os.environ["MLFLOW_TRACKING_URI"])).info.status == "FAILED"
    assert not tracker.pending


def test_the_machine_is_watched_until_the_end_and_an_outage_is_told_once(home, server, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    pretend_gpu(monkeypatch)
    client = connect(server.url)

    def wait_for_load(tracker):
        wait_for(lambda: "system/cpu_utilization_percentage" in client.get_run(tracker.run_id).data.metrics)

    with start() as tracker:
        tracker.tell(is_watched=True)
        tracker.tell(numbers={"train/loss": 0.5})
        wait_for_load(tracker)
        assert client.get_run(tracker.run_id).data.metrics["system/gpu_0_utilization_percentage"] == 70
    assert only_run(client).info.status == "FINISHED"
    assert [thread.name for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"] == []

    with caplog.at_level(logging.WARNING):
        second = start("seed 1")
        second.tell(numbers={"train/loss": 0.5})
        second.tell(is_watched=True)
        wait_for_load(second)
        server.away()
        second.tell(tags={"rm.verdict": "ready"})
        second.end()
    assert second.pending
    assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == ["tasks.tracking"]
    assert read_record(second.record.path(home)).tags["rm.verdict"] == "ready"


def test_the_registered_model_gives_the_checkpoints_rewards_by_its_own_code(home, tmp_path):
    """Loaded in a fresh process that finds rmcore only inside the registered model."""
    import torch

    from rmcore.config.model import ModelConfig
    from rmcore.models.reward_model import BradleyTerryRM

    rows = {"prompt": ["What is 2 + 3?", "Name a colour."], "response": ["2 + 3 is 5.", "Blue."]}
    model = BradleyTerryRM.new(ModelConfig(name="tiny"), seed=0, device=torch.device("cpu"))
    model.save(tmp_path / "best")
    with start() as tracker:
        tracker.register_model(tmp_path / "best", name="rm", key="k", **GATE_PASSED)
    code = f"""
import json, sys
import mlflow, pandas
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
loaded = mlflow.pyfunc.load_model("models:/rm@ready")
rewards = loaded.predict(pandas.DataFrame({rows!r}))["reward"].tolist()
import rmcore
print(json.dumps([rmcore.__file__, rewards]))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    origin, rewards = json.loads(done.stdout)
    assert "mlflow/artifacts" in origin
    assert rewards == pytest.approx(model.score(rows["prompt"], rows["response"]).tolist(), abs=1e-5)


def test_starting_a_run_imports_no_torch_and_prints_nothing(home, tmp_path, checkpoint):
    """In a fresh process with a fresh database, as the first run of a newcomer."""
    code = f"""
import os, sys, pathlib
from tasks.home import configure_environment
configure_environment()
from tasks.tracking import RunTracker
with RunTracker.start("demo", "x", {{}}, {{"train.lr": 1e-3}}) as tracker:
    tracker.register_model(pathlib.Path({str(checkpoint)!r}), name="rm", key="k", **{GATE_PASSED!r})
    assert not tracker.pending
assert "mlflow" in sys.modules and "torch" not in sys.modules
"""
    environment = {name: value for name, value in os.environ.items() if name not in home_module.QUIET_ENVIRONMENT}
    environment.pop("MLFLOW_TRACKING_URI")
    environment["RM_OPT_HOME"] = str(tmp_path / "fresh")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = {path.name for path in (tmp_path / "fresh").iterdir() if any(path.iterdir())}
    assert written == {"mlflow", "services"}
