"""Experiments over several machines: each cell once, the same numbers, and nothing lost with a machine."""

import json

import httpx
import pytest

from machine import PATIENCE_S, family, found
from tasks.local_services import CLUSTER
from tasks.mlflow_client import connect
from used_homes import begin

pytestmark = [pytest.mark.services, pytest.mark.night]


def numbers(outcome):
    """Metrics by cell, to the bit."""
    return {(cell["arm"], cell["seed"]): cell["metrics"] for cell in outcome["results"]["cells"]}


def test_the_servers_keep_their_records_in_the_database(cluster):
    tables = dict(
        line.split("|")
        for line in cluster.postgres.sql(
            "select schemaname, count(*) from pg_tables where schemaname in ('prefect', 'mlflow') group by 1"
        ).split()
    )
    assert int(tables["prefect"]) > 20
    assert int(tables["mlflow"]) > 20
    assert not (cluster.home / "prefect" / "prefect.db").exists()
    assert not (cluster.home / "mlflow" / "mlflow.db").exists()
    logs = [file.read_text() for file in (cluster.home / "services").glob("*.log")]
    assert not any(cluster.postgres.environment["PGPASSWORD"] in text for text in [*logs, cluster.printed])


def test_without_a_worker_nothing_is_begun(cluster, declare):
    done = cluster.rm_opt("experiment", declare("nobody"), "--runner", "pool", check=False)
    assert done.returncode == 2
    assert "no worker takes cells: start `rm-opt worker`" in done.stderr
    assert cluster.cells() == []


def assert_all_is_tracked(cluster):
    """Every cell is in MLflow, through the server's own artifact store; so is the report."""
    client = connect(cluster.mlflow.replace("http://", f"http://any:{cluster.password}@"))
    [experiment] = client.search_experiments(filter_string="name = 'rm/spread-custom'")
    assert experiment.artifact_location.startswith("mlflow-artifacts:/")
    tracked = client.search_runs([experiment.experiment_id], max_results=100)
    kinds = [run.data.tags["rm.kind"] for run in tracked]
    assert (kinds.count("matrix"), kinds.count("cell")) == (1, 2)
    assert {run.info.status for run in tracked} == {"FINISHED"}
    [parent] = [run for run in tracked if run.data.tags["rm.kind"] == "matrix"]
    assert "report/report.html" in [file.path for file in client.list_artifacts(parent.info.run_id, "report")]


def test_a_matrix_is_whole_and_the_same_though_machines_go_and_the_database_is_away(
    cluster, declare, databases, tmp_path
):
    """One of two workers is asked to end, the other one loses its power, and the third is without the database."""
    long = {"steps": 150, "eval_every": 75, "log_every": 50, "early_stopping_patience": None}
    file, summary = declare("spread", **long, resume_every_seconds=1), tmp_path / "summary.json"
    one, two = cluster.worker("one"), cluster.worker("two")
    cluster.wait_for(lambda: all("started!" in machine.said() for machine in (one, two)))
    command = cluster.begin("experiment", file, "--runner", "pool", "--summary", summary)
    cluster.wait_for(lambda: all(found(one.home, "store/.wip/train-*/resume/step_*") for one in cluster.machines))
    two.end()
    [ended] = cluster.cells(state={"type": {"any_": ["CRASHED"]}})
    assert f"{two.name} ended" in two.said()
    one.kill()

    three = cluster.worker("three")
    cluster.wait_for(lambda: "resum" in three.said() and found(three.home, "store/.wip/train-*/metrics.jsonl"))
    # Stages of all runs are forked from the one process of the worker that has imported their libraries.
    forked = [one for one, words in family(three.process.pid).items() if "rmcore.core.child_process" in words]
    assert {one.ppid() for one in forked} - {one.pid for one in forked} == {three.process.pid}
    # It continues to compute without the server, and waits for the server when it is done.
    cluster.postgres.stop()
    try:
        cluster.wait_for(lambda: cluster.http.post(f"{cluster.api}/flow_runs/filter", json={}).is_server_error)
        cluster.wait_for(lambda: found(three.home, "store/train/*/MANIFEST.json"))
    finally:
        cluster.postgres.start()

    said, _ = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 0, said
    outcome = json.loads(summary.read_text())
    assert said.count("its worker ended; started again") == said.count("its worker ended") >= 2
    assert outcome["failed"] == []
    assert len(outcome["computed"]) == 2
    for stage in ("train", "evaluate"):
        assert len(list((cluster.folder / "shared").glob(f"manifests/{stage}/*.json"))) == 2
        assert sum(machine.finished(stage) for machine in cluster.machines) == 2
    names = [run["name"] for run in cluster.cells(state={"type": {"any_": ["COMPLETED"]}})]
    assert len(names) == len(set(names)) == 2
    crashed = [run for run in cluster.cells() if run["state_type"] == "CRASHED" and run["id"] != ended["id"]]
    if cluster.hosts_differ:  # else all are one machine, whose dead runs the next one to start there finds
        assert any("its machine is silent" in run["state"]["message"] for run in crashed)

    assert_all_is_tracked(cluster)

    # On one machine, without any of this, a cell has the same numbers.
    alone, own = begin(tmp_path / "alone", databases), tmp_path / "own.json"
    login = {"PREFECT_API_URL": cluster.api, "PREFECT_API_AUTH_STRING": cluster.password}
    environment = cluster.inherited | {"RM_OPT_HOME": str(alone)} | login
    cluster.rm_opt("experiment", file, "--arms", "low", "--summary", own, environment=environment)
    expected = numbers(json.loads(own.read_text()))
    assert list(expected) == [("low", 0)]
    assert numbers(outcome).items() >= expected.items()


def test_prefect_says_what_a_worker_has_to_know_to_its_owner_only(cluster):
    place = f"{cluster.api}/variables/name/{CLUSTER}"
    assert httpx.get(place, timeout=PATIENCE_S).status_code == 401
    assert cluster.http.get(place).json()["value"] == {"shared": cluster.environment["RM_OPT_SHARED"]}


def test_a_database_that_services_do_not_use_is_refused_while_they_run(cluster):
    done = cluster.rm_opt("up", "--database", "postgresql://other@nowhere/runs", check=False)
    assert done.returncode == 2
    assert "run `rm-opt down` first" in done.stderr
