"""Runs with a uid: taken up, completed or set aside, never doubled; children under their parents in any order."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rmcore.core.errors import DataError
from rmcore.core.tracking import METRICS_FILE
from tasks import tracking
from tasks.mlflow_client import connect
from tasks.mlflow_run import MlflowRun
from tasks.run_identity import PARENT_TAG, PARENT_UID_TAG, adopt_children, join_parent, reap_dead_runs
from tasks.run_owner import HOST, PID, STARTED, this_process
from tasks.run_record import unsynced_folder
from tasks.sync import sync_pending
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
    tracker.log_metrics({"eval/gap": 0.1})
    tracker.log_table([{"arm": "muon", "accuracy": 0.7}], "arms")


def client():
    return connect(os.environ["MLFLOW_TRACKING_URI"])


def runs():
    """All runs of the study by name; fails when two have the same."""
    known = client()
    found = known.search_runs([known.get_experiment_by_name("rm/demo").experiment_id])
    by_name = {run.info.run_name: run for run in found}
    assert len(by_name) == len(found)
    return by_name


def points(run):
    """Everything that a run has in numbers, as MLflow stores it."""
    known = client()
    return {
        name: [(point.step, point.value, point.timestamp) for point in known.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def steps_and_values(run):
    return {name: [point[:2] for point in history] for name, history in points(run).items()}


def complete(run):
    """Whether a run has all that `tell` told of the artifact, each number once."""
    numbers = steps_and_values(run)
    assert numbers["train/loss"] == [(step, 1.0 / (step + 1)) for step in range(3)]
    assert numbers["eval/pairwise_accuracy_ci_high"] == [(3, 0.8)]
    assert numbers["eval/gap"] == [(0, 0.1)]
    files = {file.path for file in client().list_artifacts(run.info.run_id)}
    assert files == {"arms.json", "evaluate"}
    return run.info.status == "FINISHED"


def test_a_finished_run_started_again_gets_tags_and_nothing_else(home, artifact):
    with cell() as tracker:
        tell(tracker, artifact)
    first = runs()["muon seed 2"]
    with cell() as tracker:
        tell(tracker, artifact)
        tracker.log_metrics({"eval/gap": 0.9, "eval/new": 1.0})
        tracker.set_tags({"rm.cache": "train"})
        assert tracker.run_id == first.info.run_id
    (again,) = runs().values()
    assert complete(again)
    assert points(again) == points(first)
    assert again.info.end_time == first.info.end_time
    assert again.data.tags["rm.cache"] == "train"


def test_a_run_whose_process_was_killed_half_way_is_completed(home, artifact):
    code = f"""
import os, pathlib, signal
from tasks.home import configure_environment
configure_environment()
from tasks.tracking import RunTracker
tags, params = {{"rm.kind": "cell", "rm.key": "k1"}}, {{"train.lr": 0.02}}
tracker = RunTracker.start("demo", "muon seed 2", tags, params, uid="m-muon-2")
tracker.log_artifact_folder(pathlib.Path({str(artifact)!r}), "evaluate")
tracker._results[-1].result()
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode < 0, killed.stderr
    half = runs()["muon seed 2"]
    assert half.info.status == "RUNNING"
    assert half.data.metrics["train/loss"] == pytest.approx(1 / 3)
    with cell() as tracker:
        tell(tracker, artifact)
    (run,) = runs().values()
    assert run.info.run_id == half.info.run_id
    assert complete(run)


def test_a_failed_run_started_again_is_finished_in_the_end(home, artifact):
    tracker = cell()
    tracker.log_artifact_folder(artifact, "evaluate")
    tracker.end("FAILED")
    assert runs()["muon seed 2"].info.status == "FAILED"
    with cell() as tracker:
        assert client().get_run(tracker.run_id).info.status == "RUNNING"
        tell(tracker, artifact)
    (run,) = runs().values()
    assert complete(run)


def test_what_could_not_be_read_leaves_the_run_failed_so_that_it_is_sent_again(home, artifact):
    summary = (artifact / "summary.json").read_text()
    (artifact / "summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary.json is damaged"), cell() as tracker:
        tell(tracker, artifact)
    assert runs()["muon seed 2"].info.status == "FAILED"
    (artifact / "summary.json").write_text(summary)
    with cell() as tracker:
        tell(tracker, artifact)
    (run,) = runs().values()
    assert complete(run)


@pytest.mark.parametrize(
    "other", [{"key": "k2"}, {"key": None}, {"key": "k2", "seed": 3}], ids=["other key", "computed anew", "other param"]
)
def test_another_outcome_never_mixes_with_the_old_one(home, artifact, other):
    with cell(seed=2) as tracker:
        tell(tracker, artifact)
    before = points(runs()["muon seed 2"])
    with cell(**{"seed": 2, **other}) as tracker:
        tracker.log_metrics({"eval/gap": 0.5})
    found = runs()
    assert set(found) == {"muon seed 2", "muon seed 2 (superseded)"}
    assert steps_and_values(found["muon seed 2"]) == {"eval/gap": [(0, 0.5)]}
    assert points(found["muon seed 2 (superseded)"]) == before
    assert found["muon seed 2 (superseded)"].data.tags["rm.kind"] == "superseded"
    assert found["muon seed 2"].data.tags["rm.kind"] == "cell"


def test_an_unfinished_run_with_another_parameter_is_set_aside(home, artifact):
    cell(key=None).end("FAILED")
    with cell(key=None, **{"train.lr": 0.05}) as tracker:
        tell(tracker, artifact)
    found = runs()
    assert complete(found["muon seed 2"])
    assert found["muon seed 2"].data.params["train.lr"] == "0.05"


def test_summary_numbers_told_again_replace_the_old_ones(home):
    for gap in (0.1, 0.2, 0.1):
        with RunTracker.start("demo", "matrix", {}, {}, uid="m") as tracker:
            tracker.log_metrics({"eval/gap": gap, "eval/gap_ci_low": 0.05, "eval/unknown": float("nan")})
            tracker.log_table([{"arm": "muon", "gap": gap}, {"arm": "lion", "note": "failed"}], "arms")
            tracker.log_table([{"claim": "H1"}], "claims")
    run = runs()["matrix"]
    assert run.data.metrics == {"eval/gap": 0.1, "eval/gap_ci_low": 0.05}
    assert steps_and_values(run)["eval/gap_ci_low"] == [(0, 0.05)]
    known = client()
    table = known.load_table(run.info.experiment_id, "arms.json", [run.info.run_id])
    assert table["gap"].tolist()[0] == 0.1
    assert table.fillna("").to_dict("list") == {"arm": ["muon", "lion"], "gap": [0.1, ""], "note": ["", "failed"]}
    assert run.data.tags["mlflow.loggedArtifacts"].count("arms.json") == 1
    assert run.data.tags["mlflow.loggedArtifacts"].count("claims.json") == 1


def test_a_table_takes_only_what_json_has(home, tmp_path):
    with pytest.raises(TypeError, match="column 'path'"), matrix() as tracker:
        tracker.log_table([{"path": tmp_path}], "arms")


@pytest.mark.parametrize("parent_first", [True, False])
def test_children_are_below_their_parent_whichever_comes_first(home, artifact, parent_first, caplog):
    if parent_first:
        with matrix() as parent, cell() as child:
            tell(child, artifact)
    else:
        with cell() as child:
            tell(child, artifact)
        assert "does not know the parent of run muon seed 2" in caplog.text
        with matrix() as parent:
            pass
    found = runs()
    assert found["muon seed 2"].data.tags[PARENT_TAG] == parent.run_id
    assert complete(found["muon seed 2"])


def test_parent_and_children_that_find_each_other_at_the_same_moment_both_go_on(home):
    """Both set the same tag of the child: whoever comes second must not fail on the first one's row."""
    with matrix() as parent:
        parent_run = client().get_run(parent.run_id)
        for number in range(20):
            made = client().create_run(parent_run.info.experiment_id, tags={PARENT_UID_TAG: "m"})
            meet = threading.Barrier(2, timeout=30)

            def join(made=made, meet=meet):
                known = client()
                meet.wait()
                return join_parent(known, made, "m")

            def adopt(meet=meet):
                known = client()
                meet.wait()
                adopt_children(known, parent_run, "m")
                return True

            with ThreadPoolExecutor(2) as pool:
                assert all(future.result() for future in [pool.submit(join), pool.submit(adopt)])
            assert client().get_run(made.info.run_id).data.tags[PARENT_TAG] == parent.run_id, number


def test_a_new_parent_takes_the_children_that_are_still_valid(home, artifact):
    with matrix("old") as old, cell() as child:
        tell(child, artifact)
    with matrix("new") as new, cell() as child:
        tell(child, artifact)
    found = runs()
    assert set(found) == {"matrix", "matrix (superseded)", "muon seed 2"}
    assert old.run_id != new.run_id == found["muon seed 2"].data.tags[PARENT_TAG]


def test_after_an_outage_parents_are_sent_first(home, monkeypatch, artifact, caplog):
    database = os.environ["MLFLOW_TRACKING_URI"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD)
    with cell("muon seed 1", uid="m-muon-1") as child:
        tell(child, artifact)
    with matrix() as parent, cell() as child:
        tell(child, artifact)
        parent.log_metrics({"eval/muon": 0.7})
        parent.log_table([{"arm": "muon"}], "arms")
    caplog.clear()
    assert sync_pending(home, database) == ["matrix", "muon seed 1", "muon seed 2"]
    assert "parent" not in caplog.text
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    found = runs()
    assert found["matrix"].data.metrics == {"eval/muon": 0.7}
    for name in ("muon seed 1", "muon seed 2"):
        assert found[name].data.tags[PARENT_TAG] == found["matrix"].info.run_id
        assert complete(found[name])


def test_a_child_without_a_parent_is_sent_alone_and_found_by_the_parent_later(home, monkeypatch, artifact, caplog):
    database = os.environ["MLFLOW_TRACKING_URI"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD)
    with matrix(), cell() as child:
        tell(child, artifact)
    (parents_record,) = unsynced_folder(home).glob("matrix*")
    late = parents_record.read_text()
    parents_record.unlink()
    caplog.clear()
    assert sync_pending(home, database) == ["muon seed 2"]
    assert "does not know the parent of run muon seed 2" in caplog.text
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    alone = runs()["muon seed 2"]
    assert (alone.data.tags[PARENT_UID_TAG], PARENT_TAG in alone.data.tags) == ("m", False)
    parents_record.write_text(late)
    assert sync_pending(home, database) == ["matrix"]
    found = runs()
    assert found["muon seed 2"].data.tags[PARENT_TAG] == found["matrix"].info.run_id


def test_a_file_that_was_gone_at_the_sync_is_sent_by_the_next_start(home, monkeypatch, artifact, tmp_path):
    database = os.environ["MLFLOW_TRACKING_URI"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD)
    with cell() as tracker:
        tell(tracker, artifact)
    away = artifact.rename(tmp_path / "away")
    sync_pending(home, database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    assert "train/loss" not in runs()["muon seed 2"].data.metrics
    away.rename(artifact)
    with cell() as tracker:
        tell(tracker, artifact)
    (run,) = runs().values()
    assert complete(run)
    first = points(run)
    with cell() as tracker:
        tracker.log_metrics({"eval/gap": 0.9})
    assert points(runs()["muon seed 2"]) == first


def test_a_second_start_during_an_outage_does_not_cost_what_the_first_one_wrote(home, monkeypatch, artifact):
    database = os.environ["MLFLOW_TRACKING_URI"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD)
    with cell() as tracker:
        tell(tracker, artifact)
    interrupted = cell()
    interrupted.log_metrics({"eval/gap": 0.1})
    interrupted._thread.shutdown()  # as if its process had been killed here: no end is written
    assert len(list(unsynced_folder(home).glob("*.json"))) == 2
    sync_pending(home, database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    (run,) = runs().values()
    assert complete(run)


def test_a_record_left_by_an_outage_adds_nothing_to_a_run_completed_meanwhile(home, server, artifact, caplog):
    tracker = cell(key=None)
    with tracker.follow(artifact / METRICS_FILE):
        pass
    assert tracker.run_id
    server.kill()
    with caplog.at_level(logging.WARNING):
        tell(tracker, artifact)
        tracker.set_tags({"rm.key": "k1"})
        tracker.end()
    assert tracker.pending
    server.start()
    with cell() as again:
        tell(again, artifact)
    first = points(runs()["muon seed 2"])
    assert sync_pending(home) == ["muon seed 2"]
    (run,) = runs().values()
    assert complete(run)
    assert points(run) == first


def killed_process():
    """A process that was killed, as its runs name it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = this_process() | {PID: str(process.pid), STARTED: f"{psutil.Process(process.pid).create_time():.2f}"}
    process.kill()
    process.wait()
    return owner


def test_whoever_starts_next_ends_the_runs_of_killed_processes_and_no_others(home, monkeypatch):
    """The run of a killed process, of another machine's process with the same numbers, and of a living one."""
    owners = {"dead": killed_process()}
    owners["elsewhere"] = owners["dead"] | {HOST: "elsewhere"}
    owners["alive"] = this_process()
    known = client()
    experiment = known.create_experiment("rm/other")
    for name, owner in owners.items():
        known.create_run(experiment, run_name=name, tags={f"rm.{field}": value for field, value in owner.items()})
    known.create_run(experiment, run_name="nobody's")
    monkeypatch.setattr(tracking, "_REAPED", set())  # as in a process that has just begun
    with cell():
        pass
    found = {run.info.run_name: run.info.status for run in known.search_runs([experiment])}
    assert found == {"dead": "KILLED", "elsewhere": "RUNNING", "alive": "RUNNING", "nobody's": "RUNNING"}
    assert runs()["muon seed 2"].info.status == "FINISHED"


def test_a_run_that_was_reaped_is_taken_up_by_its_next_start(home, artifact):
    with cell(key=None) as tracker:
        pass
    for name, value in killed_process().items():
        client().set_tag(tracker.run_id, f"rm.{name}", value)
    client().update_run(tracker.run_id, "RUNNING")
    assert reap_dead_runs(client()) == ["muon seed 2"]
    with cell() as again:
        assert again.run_id == tracker.run_id
        assert reap_dead_runs(client()) == []
        tell(again, artifact)
    (run,) = runs().values()
    assert complete(run)


FIRST = """
import sys
from tasks.home import configure_environment
configure_environment()
from tasks.tracking import RunTracker
sys.stdin.readline()
with RunTracker.start("demo", sys.argv[1], {"rm.kind": "pipeline"}, {"seed": 0}) as tracker:
    tracker.log_metrics({"eval/gap": 0.5})
print(tracker.pending, tracker.run_id is not None)
"""


def test_four_first_runs_at_once_in_a_fresh_home_are_all_there(home):
    """Each would make MLflow's tables. They begin together, once all have started."""
    (home / "mlflow" / "mlflow.db").unlink()
    command = [sys.executable, "-c", FIRST]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = [subprocess.Popen([*command, f"run {number}"], **pipes) for number in range(4)]
    for process in first:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in first:
        said, errors = process.communicate(timeout=300)
        assert (said, process.returncode) == ("False True\n", 0), errors
    assert {name: run.info.status for name, run in runs().items()} == {
        f"run {number}": "FINISHED" for number in range(4)
    }


@pytest.mark.parametrize("error", [KeyError("alembic"), RuntimeError("dictionary changed size"), ImportError("mlflow")])
def test_whatever_fails_in_the_tracking_costs_no_run_and_is_sent_later(home, artifact, monkeypatch, caplog, error):
    """Not only what MLflow says in its own errors: the libraries beneath it raise what they like."""

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(MlflowRun, "send_metrics", fail)
        with cell() as tracker:
            tell(tracker, artifact)
    assert tracker.pending
    assert caplog.text.count("rm-opt sync") == 1
    assert sync_pending(home) == ["muon seed 2"]
    (run,) = runs().values()
    assert complete(run)
