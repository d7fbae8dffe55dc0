"""Runs with a uid: used again where whole, else set aside, never mixed; children under their parents in any order."""

import logging
import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
from mlflow.entities import ViewType

from rmcore.core.processes import HOST, this_process
from rmcore.core.tracking import METRICS_FILE
from tasks import mlflow_client, projection
from tasks.mlflow_client import connect
from tasks.projection import MISSING_TAG, PARENT_TAG, MlflowRun, sync_pending
from tasks.run_record import read_record, unsynced_folder
from tasks.tracking import RunTracker

pytestmark = pytest.mark.services

DEAD = "http://127.0.0.1:9"


def cell(name="muon seed 2", key="k1", uid="m-muon-2", **params):
    tags = {"rm.kind": "cell", "rm.matrix": "m", **({} if key is None else {"rm.key": key})}
    return RunTracker.start("demo", name, tags, {"train.lr": 0.02, **params}, uid=uid, parent_uid="m")


def matrix(key="all"):
    return RunTracker.start("demo", "matrix", {"rm.kind": "matrix", "rm.key": key}, {"size": "small"}, uid="m")


def tell(tracker, artifact):
    tracker.log_artifact_folder(artifact, "evaluate")
    tracker.tell(numbers={"eval/gap": 0.1})


def whole(artifact, *given, **named):
    """The tracker of a cell's run that has ended, and was told all."""
    with cell(*given, **named) as tracker:
        tell(tracker, artifact)
    return tracker


@contextmanager
def outage(monkeypatch):
    """Runs are tracked where nothing answers; gives MLflow's address, which is theirs again after it."""
    database = os.environ["MLFLOW_TRACKING_URI"]
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", DEAD)
        yield database


def client():
    return connect(os.environ["MLFLOW_TRACKING_URI"])


def runs(view=ViewType.ACTIVE_ONLY):
    """All runs of the study by name; fails when two have the same."""
    known = client()
    found = known.search_runs([known.get_experiment_by_name("rm/demo").experiment_id], run_view_type=view)
    by_name = {run.info.run_name: run for run in found}
    assert len(by_name) == len(found)
    return by_name


def deleted():
    """The same of those that another attempt has replaced."""
    return runs(ViewType.DELETED_ONLY)


def statuses():
    """Status of each run of the study that is not deleted, by id."""
    known = client()
    found = known.search_runs([known.get_experiment_by_name("rm/demo").experiment_id])
    return {run.info.run_id: run.info.status for run in found}


def points(run):
    """Everything that a run has in numbers, as MLflow stores it."""
    known = client()
    return {
        name: [(point.step, point.value, point.timestamp) for point in known.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def steps_and_values(run):
    return {name: [point[:2] for point in history] for name, history in points(run).items()}


def only(name="muon seed 2"):
    """The run, which is the only one."""
    [run] = runs().values()
    assert run.info.run_name == name
    return run


def complete(run):
    """Whether a run has all that `tell` told of the artifact, each number once."""
    numbers = steps_and_values(run)
    assert numbers["train/loss"] == [(step, 1.0 / (step + 1)) for step in range(3)]
    assert numbers["eval/test_pairwise_accuracy"] == [(3, 0.7)]
    assert run.data.tags["interval/test_pairwise_accuracy"] == "0.6 to 0.8"
    assert numbers["eval/gap"] == [(0, 0.1)]
    files = {file.path for file in client().list_artifacts(run.info.run_id)}
    assert files - {"evaluate", "numbers.json"} <= {"summary.json"}
    return run.info.status == "FINISHED"


def test_a_finished_run_started_again_gets_tags_and_nothing_else(home, artifact):
    whole(artifact)
    first = runs()["muon seed 2"]
    with cell() as tracker:
        tell(tracker, artifact)
        tracker.tell(numbers={"eval/gap": 0.9, "eval/new": 1.0}, tags={"rm.cache": "train"})
        assert tracker.run_id == first.info.run_id
    (again,) = runs().values()
    assert complete(again)
    assert points(again) == points(first)
    assert again.info.end_time == first.info.end_time
    assert again.data.tags["rm.cache"] == "train"


KILLED = """
import os, pathlib, signal
from tasks.home import configure_environment
configure_environment()
from tasks.tracking import RunTracker
tags, params = {{"rm.kind": "cell", "rm.key": "k1"}}, {{"train.lr": 0.02}}
tracker = RunTracker.start("demo", "muon seed 2", tags, params, uid="m-muon-2")
with tracker.follow(pathlib.Path({curves!r})):
    pass
tracker.log_artifact_folder(pathlib.Path({artifact!r}), "evaluate")
tracker._update().result()
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(artifact):
    """Let a process that feeds a run be killed half way."""
    code = KILLED.format(curves=str(artifact / METRICS_FILE), artifact=str(artifact))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode < 0, ended.stderr


def test_a_run_whose_process_was_killed_is_ended_by_the_next_start_and_replaced_by_a_whole_one(home, artifact):
    """And no run of another machine's process with the same numbers, nor of a living one."""
    killed(artifact)
    half = only()
    assert half.info.status == "RUNNING"
    assert half.data.metrics["train/loss"] == pytest.approx(1 / 3)
    [left] = unsynced_folder(home).iterdir()
    dead = read_record(left)
    for study, owner in (("elsewhere", dead.owner | {HOST: "elsewhere"}), ("alive", this_process())):
        other = replace(dead, study=study, owner=owner)
        MlflowRun(other, home)
        other.save(home)
    with matrix():
        pass
    assert runs()["muon seed 2"].info.status == "KILLED"
    assert points(runs()["muon seed 2"]) == points(half)  # each number once
    known = client()
    for study in ("elsewhere", "alive"):
        [run] = known.search_runs([known.get_experiment_by_name(f"rm/{study}").experiment_id])
        assert run.info.status == "RUNNING"
    whole(artifact)
    assert complete(runs()["muon seed 2"])
    assert points(deleted()["muon seed 2"]) == points(half)


def test_a_process_killed_during_an_outage_has_its_run_completed_by_the_sync(home, monkeypatch, artifact):
    with outage(monkeypatch) as database:
        killed(artifact)
        assert sync_pending(home, database) == ["muon seed 2"]
    assert only().info.status == "KILLED"
    assert steps_and_values(only())["train/loss"] == [(step, 1.0 / (step + 1)) for step in range(3)]


def test_a_finished_run_is_kept_until_another_one_of_its_uid_has_finished(home, artifact):
    first = whole(artifact).run_id
    with pytest.raises(ZeroDivisionError), cell(key=None) as tracker:
        tracker.tell(numbers={"eval/gap": 1 / 0})
    failed = tracker.run_id
    assert statuses() == {first: "FINISHED", failed: "FAILED"}
    with cell(key=None) as tracker:
        assert tracker.run_id  # waits for it
        assert statuses() == {first: "FINISHED", failed: "FAILED", tracker.run_id: "RUNNING"}
        tell(tracker, artifact)
        tracker.tell(tags={"rm.key": "k2"})
    assert statuses() == {tracker.run_id: "FINISHED"}
    assert complete(only())


def test_an_open_run_is_deleted_once_another_of_its_uid_has_finished_and_completed_by_its_own_process(home, artifact):
    """Whether its process is of this machine or another: if it lives, it sends all it has at its end."""
    with cell(key=None) as other:
        assert other.run_id  # waits for it
        with pytest.raises(ZeroDivisionError), cell(key=None) as tracker:
            tracker.tell(numbers={"eval/gap": 1 / 0})
        assert statuses() == {other.run_id: "RUNNING", tracker.run_id: "FAILED"}
        finished = whole(artifact).run_id
        assert statuses() == {finished: "FINISHED"}
        tell(other, artifact)
        other.tell(tags={"rm.key": "k1"})
    assert not other.pending
    assert complete(only())


@pytest.mark.parametrize(
    "other", [{"key": "k2"}, {"key": None}, {"key": "k2", "seed": 3}], ids=["other key", "computed anew", "other param"]
)
def test_another_outcome_never_mixes_with_the_old_one(home, artifact, other):
    whole(artifact, seed=2)
    before = points(runs()["muon seed 2"])
    with cell(**{"seed": 2, **other}) as tracker:
        tracker.tell(numbers={"eval/gap": 0.5})
    assert steps_and_values(only()) == {"eval/gap": [(0, 0.5)]}
    assert points(deleted()["muon seed 2"]) == before


def test_summary_numbers_told_again_replace_the_old_ones(home):
    for gap in (0.1, 0.2, 0.1):
        with RunTracker.start("demo", "matrix", {}, {}, uid="m") as tracker:
            tracker.tell(numbers={"eval/gap": gap, "eval/gap_ci_low": 0.05, "eval/unknown": float("nan")})
    run = runs()["matrix"]
    assert run.data.metrics == {"eval/gap": 0.1, "eval/gap_ci_low": 0.05}


def test_children_are_below_their_parent_whichever_comes_first_and_below_a_new_one(home, artifact):
    whole(artifact)
    assert PARENT_TAG not in only().data.tags
    with matrix("old") as old:
        pass
    assert runs()["muon seed 2"].data.tags[PARENT_TAG] == old.run_id
    with matrix("new") as new:
        assert new.run_id  # waits for it
        child = whole(artifact)
        assert client().get_run(child.run_id).data.tags[PARENT_TAG] == new.run_id
    found = runs()
    assert set(found) == {"matrix", "muon seed 2"}
    assert set(deleted()) == {"matrix"}
    assert old.run_id != new.run_id == found["muon seed 2"].data.tags[PARENT_TAG]
    assert complete(found["muon seed 2"])


def test_after_an_outage_parents_are_sent_first_and_one_that_comes_later_finds_its_children(
    home, monkeypatch, artifact
):
    with outage(monkeypatch) as database:
        whole(artifact, "muon seed 1", uid="m-muon-1")
        with matrix() as parent:
            whole(artifact)
            parent.tell(numbers={"eval/muon": 0.7})
        late = parent.record.path(home)
        record = late.read_text()
        late.unlink()
        assert sync_pending(home, database) == ["muon seed 1", "muon seed 2"]
    assert not any(PARENT_TAG in run.data.tags for run in runs().values())
    with outage(monkeypatch):
        whole(artifact, "muon seed 3", uid="m-muon-3")
        late.write_text(record)
        assert sync_pending(home, database) == ["matrix", "muon seed 3"]
    found = runs()
    assert found["matrix"].data.metrics == {"eval/muon": 0.7}
    for name in ("muon seed 1", "muon seed 2", "muon seed 3"):
        assert found[name].data.tags[PARENT_TAG] == found["matrix"].info.run_id
        assert complete(found[name])


def test_a_file_that_was_gone_at_the_sync_is_sent_by_the_next_start(home, monkeypatch, artifact, tmp_path):
    with outage(monkeypatch) as database:
        whole(artifact)
        away = artifact.rename(tmp_path / "away")
        sync_pending(home, database)
    assert "train/loss" not in runs()["muon seed 2"].data.metrics
    away.rename(artifact)
    whole(artifact)
    run = only()
    assert complete(run)
    first = points(run)
    with cell() as tracker:
        tracker.tell(numbers={"eval/gap": 0.9})
    assert points(runs()["muon seed 2"]) == first


def test_a_second_start_during_an_outage_does_not_cost_what_the_first_one_wrote(home, monkeypatch, artifact):
    with outage(monkeypatch) as database:
        whole(artifact)
        interrupted = cell()
        interrupted.tell(numbers={"eval/gap": 0.1})
        interrupted._thread.shutdown()  # as if its process had been killed here: no end is written
        assert len(list(unsynced_folder(home).glob("*.json"))) == 2
        assert sync_pending(home, database) == ["muon seed 2"]  # the other one is running
        monkeypatch.setattr(projection, "has_died", lambda owner: True)
        assert sync_pending(home, database) == ["muon seed 2"]
    assert complete(only())


def test_a_record_left_by_an_outage_adds_nothing_to_a_run_completed_meanwhile(home, server, artifact, caplog):
    tracker = cell(key=None)
    with tracker.follow(artifact / METRICS_FILE):
        pass
    assert tracker.run_id
    server.away()
    with caplog.at_level(logging.WARNING):
        tell(tracker, artifact)
        tracker.tell(tags={"rm.key": "k1"})
        tracker.end()
    assert tracker.pending
    server.back()
    first = points(client().get_run(whole(artifact).run_id))
    assert sync_pending(home) == ["muon seed 2"]
    run = only()
    assert complete(run)
    assert points(run) == first


@pytest.mark.parametrize("error", [KeyError("alembic"), ImportError("mlflow")])
def test_whatever_fails_in_the_tracking_costs_no_run_and_is_sent_later(home, artifact, monkeypatch, caplog, error):
    """Not only what MLflow says in its own errors: the libraries beneath it raise what they like."""

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(MlflowRun, "__init__", fail)
        tracker = whole(artifact)
    assert tracker.pending
    assert caplog.text.count("its record is") == 1
    assert sync_pending(home) == ["muon seed 2"]
    assert complete(only())


def refusal(code):
    """What MLflow's store raises where its database refuses a row, or is locked."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2

    return MlflowException("(sqlite3.IntegrityError) UNIQUE constraint failed", databricks_pb2.ErrorCode.Value(code))


def refuse(monkeypatch, code, times, only=None):
    """Let every method of MLflow's client, or `only` one, be refused so many times before it works."""
    from mlflow import MlflowClient

    refused = Counter()

    def wrapped(name, method):
        def call(*given, **named):
            refused[name] += 1
            if refused[name] <= times:
                raise refusal(code)
            return method(*given, **named)

        return call

    for name, method in list(vars(MlflowClient).items()):
        if callable(method) and not name.startswith("_") and only in (None, name):
            monkeypatch.setattr(MlflowClient, name, wrapped(name, method))


@pytest.mark.parametrize("code", ["BAD_REQUEST", "TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR"])
def test_what_the_database_refuses_for_a_moment_is_told_again_and_is_no_outage(
    home, artifact, monkeypatch, caplog, code
):
    with monkeypatch.context() as broken:
        broken.setattr(mlflow_client, "PAUSE_SECONDS", (0.01, 0.02))
        refuse(broken, code, times=2)
        tracker = whole(artifact)
    assert not tracker.pending
    assert "its record is" not in caplog.text
    (run,) = runs().values()
    assert complete(run)


def test_runs_that_tag_their_experiment_at_once_all_do(home):
    """Each inserts a row where there is none; in a fresh database one of them comes first."""
    names = [f"run {number}" for number in range(8)]
    trackers = [RunTracker.start("demo", name, {}, {}) for name in names]
    assert all(tracker.run_id for tracker in trackers)
    for number in range(6):
        for own, tracker in enumerate(trackers):
            tracker.tell(experiment_tags={f"rm.{number}": str(own)}, numbers={"eval/own": own})
    for tracker in trackers:
        tracker.end()
    assert not any(tracker.pending for tracker in trackers)
    found = {name: (run.info.status, run.data.metrics) for name, run in runs().items()}
    assert found == {name: ("FINISHED", {"eval/own": own}) for own, name in enumerate(names)}  # and do not mix
    assert {f"rm.{number}" for number in range(6)} <= client().get_experiment_by_name("rm/demo").tags.keys()


def test_what_mlflow_never_takes_costs_the_run_that_alone(home, artifact, monkeypatch, caplog):
    """The run ends and is not taken for whole: the next start of the same sends it."""
    with monkeypatch.context() as broken:
        broken.setattr(mlflow_client, "RETRY_SECONDS", 0.1)
        refuse(broken, "BAD_REQUEST", times=10**6, only="log_artifact")
        with cell() as tracker:
            tracker.tell(files={str(artifact / "summary.json"): ""})
            tell(tracker, artifact)
    assert not tracker.pending
    assert caplog.text.count("its record is") == 1
    run = only()
    assert complete(run)
    assert "IntegrityError" in run.data.tags[MISSING_TAG]
    with cell() as tracker:
        tracker.tell(files={str(artifact / "summary.json"): ""})
        tell(tracker, artifact)
    run = only()
    assert complete(run)
    assert MISSING_TAG not in run.data.tags
    assert "summary.json" in {file.path for file in client().list_artifacts(run.info.run_id)}


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_outage_that_is_over_when_the_run_ends_leaves_nothing_to_do(home, server, artifact, is_deleted):
    """The run that had begun is completed, or made again where a person has deleted it."""
    tracker = cell()
    begun = tracker.run_id
    with tracker.follow(artifact / METRICS_FILE):
        pass
    tracker._update().result()
    if is_deleted:
        client().delete_run(begun)
    server.away()
    tracker.tell(numbers={"eval/before": 1.0})
    tracker._update().result()
    assert tracker.pending
    server.back()
    tell(tracker, artifact)
    tracker.end()
    assert not tracker.pending
    run = only()
    assert complete(run)
    assert (run.info.run_id == begun) is not is_deleted
    assert run.data.metrics["eval/before"] == 1.0
    assert not list(unsynced_folder(home).glob("*.json"))
