"""Another user of this machine takes the servers' ports where that works, and never hears a password."""

import sqlite3
import subprocess
import sys

import httpx
import pytest

from flows import services
from machine import PATIENCE_S, free_ports
from other_user import AS_ROOT, NOBODY
from owner_login import Patient
from rmcore.core.processes import marked
from tasks.local_services import HOME_MARK, MLFLOW_SERVER, PREFECT_SERVER, SERVERS, running_services
from tasks.passwords import basic_authorization, identity
from used_homes import begin, take_as_home

pytestmark = [pytest.mark.services, AS_ROOT]

PREFECT_YAML = """
name: trial
pull:
  - prefect.deployments.steps.set_working_directory:
      directory: "{{ $RM_OPT_PROJECT }}"
deployments:
  - {name: trial, entrypoint: "trial.py:trial", work_pool: {name: rm-opt}}
  - {name: older, entrypoint: "trial.py:trial", work_pool: {name: rm-opt}}
"""
TRIAL_FLOW = '''
from prefect import flow

@flow(name="trial")
def trial():
    """Does nothing."""
'''
SHELL = [{"prefect.deployments.steps.run_shell_script": {"script": "id > /tmp/owned"}}]
LEFT_OVER = "from tasks.home import configure_environment; configure_environment()"


@pytest.fixture
def home(tmp_path, monkeypatch, databases):
    yield take_as_home(begin(tmp_path / "home", databases), monkeypatch)
    services.down()


@pytest.fixture
def up(tmp_path):
    """The command, in a process of its own: what it holds ends with it."""
    root = tmp_path / "project"
    (root / "flows").mkdir(parents=True)
    (root / "flows" / "prefect.yaml").write_text(PREFECT_YAML)
    (root / "trial.py").write_text(TRIAL_FLOW)
    script = (
        "import sys; from pathlib import Path; from flows import services; root, *ports = sys.argv[1:]; "
        "services.up(*map(int, ports), root=Path(root), tell=print)"
    )

    def run(*ports):
        words = [sys.executable, "-c", script, str(root), *map(str, ports)]
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)

    return run


def kill(processes):
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=PATIENCE_S)


def ask(method, address, **more):
    with httpx.Client(timeout=PATIENCE_S, transport=Patient()) as client:
        return client.request(method, address, **more)


def deployments(api, login):
    answer = ask("POST", f"{api}/deployments/filter", json={}, headers=login).raise_for_status()
    return {one["name"]: one for one in answer.json()}


def test_a_port_that_another_user_has_before_the_start_is_named(home, up, other_user):
    ports = free_ports(len(SERVERS))
    for port, name in zip(ports, (PREFECT_SERVER, MLFLOW_SERVER), strict=True):
        assert other_user.take(port) == {port}
        refused = up(*ports)
        assert refused.returncode
        assert f"port {port} on 127.0.0.1 cannot be used for {name}" in refused.stderr
        assert f"uid {NOBODY}" in refused.stderr
        assert not running_services(home)
        ports[ports.index(port)] = free_ports(1)[0]
    assert other_user.end() == ""


def test_another_user_hears_no_password_while_the_servers_run_and_after_their_death(home, up, other_user):
    ports = free_ports(len(SERVERS))
    api = f"http://127.0.0.1:{ports[0]}/api"
    started = up(*ports)
    assert started.returncode == 0, started.stderr
    before = identity(home)
    login = basic_authorization(before.password(PREFECT_SERVER))
    running = running_services(home)
    left_over = running[MLFLOW_SERVER].process.environ()  # as a run has it that the worker started

    # Nothing that a request brings is run.
    trial = deployments(api, login)["trial"]
    place = f"{api}/deployments/{trial['id']}"
    for method, where, body in (
        ("PATCH", place, {"pull_steps": SHELL}),
        ("PATCH", place, {"entrypoint": "/tmp/owned.py:flow"}),
        ("PATCH", place, {"path": "/tmp"}),
        ("POST", f"{api}/deployments/", {"name": "n", "flow_id": trial["flow_id"], "pull_steps": SHELL}),
        ("POST", f"{api}/work_pools/", {"name": "p", "type": "process", "base_job_template": {"variables": {}}}),
        ("PATCH", f"{api}/work_pools/rm-opt", {"base_job_template": {"job_configuration": {"command": "id"}}}),
        ("POST", f"{place}/create_flow_run", {"job_variables": {"command": "id"}}),
    ):
        answer = ask(method, where, json=body, headers=login)
        assert (answer.status_code, "as flows/prefect.yaml declares it" in answer.text) == (403, True), (where, body)
    assert ask("POST", f"{place}/create_flow_run", json={}, headers=login).is_success

    # While one process of ours lives, the ports of the dead are not to be had.
    kill([running[name].process for name in SERVERS])
    assert other_user.take(*ports, seconds=3) == set()
    database = sqlite3.connect(home / "prefect" / "prefect.db")
    with database:
        database.execute(
            "update deployment set entrypoint = '/tmp/owned.py:flow', name = 'stolen' where name = 'older'"
        )
    database.close()
    again = up()
    assert again.returncode == 0, again.stderr
    assert "stolen is removed" in again.stdout
    assert identity(home) == before
    assert set(deployments(api, login)) == {"trial", "older"}

    # When all are dead they are, and neither a run that is left over nor `up` sends anything there.
    kill(marked(HOME_MARK, str(home)))
    assert other_user.take(*ports, seconds=PATIENCE_S) == set(ports)
    run = subprocess.run(
        [sys.executable, "-c", LEFT_OVER], env=left_over, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "is not ours" in run.stderr
    assert f"uid {NOBODY}" in run.stderr
    refused = up(*ports)
    assert f"uid {NOBODY}" in refused.stderr
    heard = other_user.end()
    assert "uthorization" not in heard
    assert not [name for name in SERVERS if before.password(name) in heard]

    # From this start on there are other passwords.
    after = identity(home)
    assert not {before.password(name) for name in SERVERS} & {after.password(name) for name in SERVERS}
