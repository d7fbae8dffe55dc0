"""`rm-opt up`, `status` and `down` with real servers: they run flows, and leave nothing behind that is ours.

Another user of this machine takes the servers' ports where that works, and never hears a password.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import httpx
import psutil
import pytest

from flows import prefect_api, prefect_client, services
from machine import PATIENCE_S, free_ports, wait_for
from owner_login import Patient, owners
from rmcore.core import ports as ports_module
from rmcore.core.errors import ServiceError
from rmcore.core.processes import HOST, OWNER_FIELDS, PID, STARTED, runs, start_of, terminate, this_process
from tasks import home as home_module
from tasks.home import PROJECT_VARIABLE
from tasks.local_services import HOME_MARK, MLFLOW_SERVER, SERVERS, running_services
from tasks.passwords import basic_authorization, mlflow_login, password
from tasks.projection import sync_pending
from tasks.run_record import RunRecord
from used_homes import begin, take_as_home

pytestmark = pytest.mark.services

PREFECT_YAML = """
name: trial
pull:
  - prefect.deployments.steps.set_working_directory:
      directory: "{{ $RM_OPT_PROJECT }}"
deployments:
  - {name: trial, entrypoint: "trial.py:trial", work_pool: {name: rm-opt}}
  - {name: waits, entrypoint: "waits.py:waits", work_pool: {name: rm-opt}}
"""
TRIAL_FLOW = '''
import os, subprocess, sys
from pathlib import Path
from prefect import flow

@flow(name="trial")
def trial(folder: str):
    """Leaves a child in a session of its own behind, as a torchrun would."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    lines = [str(child.pid), os.environ["MLFLOW_TRACKING_URI"], os.environ["PREFECT_API_URL"], str(sys.flags.safe_path)]
    Path(folder, "seen").write_text("\\n".join(lines))
'''
WAITING_FLOW = '''
import os, time
from pathlib import Path
from flows.form import described_flow

@described_flow("waits", "waits", lambda given: "waits")
def waits(file: str):
    """Waits for its end."""
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)
'''
CONFIGURED = """
import os, sys, time
from tasks.home import configure_environment
configure_environment()
"""
CHOSEN = (
    CONFIGURED
    + """
from flows.prefect_api import choose_api
choose_api()
"""
)
COMMAND = (
    CHOSEN
    + """
from flows.cli_common import prefect_in_use
from flows.console import quiet_prefect
sys.path.insert(0, sys.argv[1])
from waits import waits
quiet_prefect()
with prefect_in_use("stages"):
    waits(file=sys.argv[2])
"""
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    yield take_as_home(tmp_path / "home", monkeypatch)
    services.down()


@pytest.fixture
def used_home(home, databases):
    """Our home with Prefect's database in it, which takes ten seconds to make."""
    return begin(home, databases)


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    (root / "flows").mkdir(parents=True)
    (root / "flows" / "prefect.yaml").write_text(PREFECT_YAML)
    (root / "trial.py").write_text(TRIAL_FLOW)
    (root / "waits.py").write_text(WAITING_FLOW)
    return root


def sleeper(**options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)


def program(text: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=PATIENCE_S, **options)


def children() -> set[psutil.Process]:
    """Live descendants of this test process."""
    return {child for child in psutil.Process().children(recursive=True) if runs(child)}


def ask(method: str, url: str, body: dict | list | None = None) -> dict:
    login = basic_authorization(os.environ["PREFECT_API_AUTH_STRING"])
    with httpx.Client(timeout=PATIENCE_S, transport=Patient()) as client:
        return client.request(method, url, json=body, headers=login).raise_for_status().json()


def run_deployment(api: str, folder: Path) -> dict:
    deployment = ask("GET", f"{api}/deployments/name/trial/trial")
    body = {"parameters": {"folder": str(folder)}}
    run = ask("POST", f"{api}/deployments/{deployment['id']}/create_flow_run", body)

    def ended():
        current = ask("GET", f"{api}/flow_runs/{run['id']}")
        return current if current["state_type"] in ("COMPLETED", "FAILED", "CRASHED") else None

    return wait_for(ended)


def runs_end_with_prefect(home: Path, api: str, root: Path, folder: Path) -> list[str]:
    """Kill Prefect's server in the middle of a run by the worker and of one by a command; the ids of both runs.

    Neither has come to `begin_flow_run`, so what is known of their processes was known before the runs began.
    """
    deployment = ask("GET", f"{api}/deployments/name/waits/waits")
    by_worker, by_command = folder / "by_worker", folder / "by_command"
    body = {"parameters": {"file": str(by_worker)}}
    ids = [ask("POST", f"{api}/deployments/{deployment['id']}/create_flow_run", body)["id"]]
    program = [sys.executable, "-c", COMMAND, str(root), str(by_command)]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as command:
        for file in (by_worker, by_command):
            wait_for(lambda file=file: file.is_file() and file.read_text())
        worked = psutil.Process(int(by_worker.read_text()))
        assert int(by_command.read_text()) == command.pid
        running = ask("POST", f"{api}/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}})
        ids += [run["id"] for run in running if owners(run) == [command.pid]]
        assert len(ids) == 2
        assert owners(ask("GET", f"{api}/flow_runs/{ids[0]}")) == [worked.pid]
        running_services(home)["prefect-server"].process.kill()
        _, said = command.communicate(timeout=PATIENCE_S)
    assert not psutil.wait_procs([worked], timeout=PATIENCE_S)[1]
    assert command.returncode == 2
    ended = f"error: Prefect's server at {api} has ended during the run. Finished stages are stored: "
    # Prefect's words of it, if a line of the run was still to be sent to the server; the last ends no line of its own.
    said = said.replace("--- Error logging to API ---\n", "").replace("All connection attempts failed", "")
    assert said.splitlines()[-1] == f"{ended}run the same command again."
    # Before it: how long Prefect took to start.
    assert [line for line in said.splitlines()[:-1] if not line.startswith("Prefect ")] == []
    assert (home / "services" / "worker.log").read_text().count(f"{ended}start the run again.") == 1
    return ids


def running_flow(api: str, owner: dict[str, str]) -> str:
    """A flow run that Prefect believes to be running, with the given owner."""
    flow_id = ask("POST", f"{api}/flows/", {"name": "owned"})["id"]
    run = ask("POST", f"{api}/flow_runs/", {"flow_id": flow_id, "state": {"type": "RUNNING"}})["id"]
    with prefect_client.prefect_at(api) as client:
        client.update_flow_run_labels(UUID(run), {prefect_client.OWNER: ":".join(owner[name] for name in OWNER_FIELDS)})
    return run


def cancelled_before_it_began(api: str, root: Path) -> dict:
    """A run that a user cancels while its process starts, and what Prefect's engine says of it."""
    deployment = ask("GET", f"{api}/deployments/name/waits/waits")
    body = {"flow_id": deployment["flow_id"], "deployment_id": deployment["id"], "parameters": {"file": "never"}}
    run = ask("POST", f"{api}/flow_runs/", body | {"state": {"type": "PENDING"}})
    ask("POST", f"{api}/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}, "force": True})
    command = [sys.executable, "-m", "prefect.engine", run["id"]]
    environment = {**os.environ, "PREFECT_API_URL": api, PROJECT_VARIABLE: str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (0, False), done.stdout + done.stderr
    return ask("GET", f"{api}/flow_runs/{run['id']}")


def the_dead_are_marked(api: str) -> None:
    """A run is Crashed whose process has ended, and no other one."""
    ended = sleeper()
    owner = this_process() | {PID: str(ended.pid), STARTED: start_of(ended.pid)}
    ended.kill()
    ended.wait()
    dead, ours, elsewhere = (running_flow(api, who) for who in (owner, this_process(), owner | {HOST: "elsewhere"}))
    begun = running_flow(api, owner)
    with prefect_client.prefect_at(api) as client:  # it was started again, and is ours now
        prefect_client.claim_run(client, UUID(begun))
    assert owners(ask("GET", f"{api}/flow_runs/{begun}")) == [os.getpid()]
    assert len(prefect_client.reap_dead_runs(api)) == 1
    states = [ask("GET", f"{api}/flow_runs/{run}")["state_type"] for run in (dead, begun, ours, elsewhere)]
    assert states == ["CRASHED", "RUNNING", "RUNNING", "RUNNING"]


def let_go() -> None:
    """What this process holds, a command that has ended does not."""
    for one in ports_module._held.values():
        one.close()
    ports_module._held.clear()


def nothing_is_sent_to(other_user, ports: list[int], root: Path, left_over: dict[str, str], known: str) -> None:
    """When all are dead another user gets the ports: neither a run that is left over nor `up` sends anything there."""
    let_go()
    assert other_user.take(*ports, seconds=PATIENCE_S) == set(ports)
    run = program(CONFIGURED, env=left_over)
    with pytest.raises(ServiceError) as refused:
        services.up(*ports, root=root)
    assert "another program" in str(refused.value)
    assert "is another program's" in run.stderr
    heard = other_user.end()
    assert "uthorization" not in heard
    assert known not in heard


def test_the_services_run_a_deployment_outlive_their_death_and_end_without_a_trace(home, project, tmp_path, request):
    other_user = request.getfixturevalue("other_user") if os.geteuid() == 0 else None
    before = children()
    prefect_port, mlflow_port = ports = free_ports(2)
    api, mlflow_url = f"http://127.0.0.1:{prefect_port}/api", f"http://127.0.0.1:{mlflow_port}"
    started = services.up(*ports, root=project)
    assert [service.healthy for service in started] == [True] * 3
    trial = f"{api}/deployments/{ask('GET', f'{api}/deployments/name/trial/trial')['id']}"
    far = {"schedule": {"cron": "0 4 29 2 *", "timezone": "UTC"}, "active": True}
    ask("POST", f"{trial}/schedules", [far])
    [scheduled] = ask("GET", trial)["schedules"]
    assert services.up(root=project) == started  # nothing is started twice
    assert ask("GET", trial)["schedules"] == [scheduled]  # a user's own stays, though all is deployed again
    with pytest.raises(ServiceError, match="--mlflow-port"):
        services.up(prefect_port, prefect_port + 1, root=project)
    known, left_over = password(home), running_services(home)[MLFLOW_SERVER].process.environ()

    assert run_deployment(api, tmp_path)["state_type"] == "COMPLETED"
    left_behind, *seen = (tmp_path / "seen").read_text().split()
    assert seen == [mlflow_url, api, "True"]
    home_module.configure_environment()
    assert (os.environ["PREFECT_API_URL"], os.environ["MLFLOW_TRACKING_URI"]) == (api, mlflow_url)

    the_dead_are_marked(api)
    assert cancelled_before_it_began(api, project)["state_type"] == "CANCELLED"
    both = runs_end_with_prefect(home, api, project, tmp_path)
    mlflow = running_services(home)[MLFLOW_SERVER].process
    mlflow.kill()
    mlflow.wait(timeout=PATIENCE_S)

    # While one process of ours lives, the ports of the dead are not to be had. They come back where the others look for
    # them, without being told where that was.
    let_go()
    assert other_user is None or other_user.take(*ports, seconds=3) == set()
    again = services.up(root=project)
    assert [service.url for service in again] == [service.url for service in started]
    assert [service.healthy for service in again] == [True] * 3
    assert password(home) == known
    prefect_client.reap_dead_runs(api)
    assert [ask("GET", f"{api}/flow_runs/{run}")["state_type"] for run in both] == ["CRASHED"] * 2

    orphan = psutil.Process(int(left_behind))
    assert services.down() == ["prefect-server", "mlflow-server", "worker"]
    assert children() <= before
    assert not runs(orphan)
    assert [service.pid for service in services.status()] == [None] * 3
    assert services.down() == []
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    if other_user is not None:
        nothing_is_sent_to(other_user, ports, project, left_over, known)


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "shared"])
@pytest.mark.parametrize("name", SERVERS)
def test_a_port_of_another_program_is_refused_and_the_program_untouched(home, project, name, shared):
    """Of another user's program: see the test above."""
    before = children()
    with socket.create_server(("127.0.0.1", 0), reuse_port=shared) as foreign:
        port = foreign.getsockname()[1]
        ports = [port if one == name else free for one, free in zip(SERVERS, free_ports(2), strict=True)]
        flag = f"--{name.removesuffix('-server')}-port"
        with pytest.raises(ServiceError, match=rf"port {port} on 127\.0\.0\.1 cannot be used for {name} .*{flag}"):
            services.up(*ports, root=project)
        assert services.down() == []
        socket.create_connection(("127.0.0.1", port)).close()
    assert home.stat().st_mode & 0o777 == (home / "prefect").stat().st_mode & 0o777 == 0o700  # before servers write
    assert children() <= before


def test_a_start_that_fails_shows_the_log_and_ends_what_it_began(home, project):
    before = children()
    (home / "prefect").mkdir(parents=True)
    (home / "prefect" / "prefect.db").write_text("this is no database, and Prefect's server will say so")
    with pytest.raises(ServiceError, match=r"prefect-server ended while starting(.|\n)*not a database"):
        services.up(*free_ports(2), root=project)
    assert children() <= before
    assert running_services(home) == {}


EMBEDDED = (
    CHOSEN
    + """
import httpx
from prefect import flow
from flows.cli_common import prefect_in_use
from flows.console import quiet_prefect
from flows.prefect_client import reap_dead_runs

@flow
def trial():
    version = os.environ["PREFECT_API_URL"] + "/admin/version"
    assert reap_dead_runs() == []
    # It listens on loopback, where every user and every page of a browser may ask.
    assert httpx.get(version, timeout=None).status_code == 401
    assert httpx.get(version, headers={"Host": "elsewhere.example"}, timeout=None).status_code == 421
    asked = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "GET"}
    assert httpx.options(version, headers=asked, timeout=None).status_code == 403
    print("ready", flush=True)
    time.sleep(600)

quiet_prefect()
with prefect_in_use("stages"):
    trial()
"""
)


def test_the_embedded_server_is_ours_alone_and_a_run_ends_with_it(used_home):
    """In a folder with a file that is named like a library."""
    used_home.parent.joinpath("html.py").write_text("raise SystemExit('executed')")
    command, pipe = [sys.executable, "-P", "-c", EMBEDDED], subprocess.PIPE
    with subprocess.Popen(command, cwd=used_home.parent, stdout=pipe, stderr=pipe, text=True) as run:
        line = run.stdout.readline()
        [server] = psutil.Process(run.pid).children()
        server.kill()
        try:
            _, said = run.communicate(timeout=PATIENCE_S)
        finally:
            run.kill()
    assert (line, run.returncode) == ("ready\n", 2), said
    *waiting, error = said.splitlines()
    # How long a busy machine takes to start it; where it was just being connected to, what Prefect says of its events.
    known = ("Prefect ", "Unable to connect to 'ws://")
    assert all(line.startswith(known) or "Service 'EventsWorker' failed" in line for line in waiting), said
    assert error == (
        f"error: Prefect's server at {error.split()[4]} has ended during the run. Finished stages are stored: run the "
        "same command again."
    )


def test_the_embedded_server_ends_with_whoever_started_it(home):
    """Also where that is killed before the server has begun to look for it."""
    with subprocess.Popen(
        [sys.executable, "-c", CHOSEN + "print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    ) as run:
        run.stdout.readline()
        [server] = psutil.Process(run.pid).children()
        run.kill()
    psutil.wait_procs([server], timeout=PATIENCE_S)
    assert not runs(server)


def test_an_embedded_server_that_cannot_start_says_why(home):
    (home / "prefect").mkdir(parents=True)
    (home / "prefect" / "prefect.db").write_text("no database " * 1000)
    done = program(CHOSEN + "from flows.cli_common import prefect_in_use\nwith prefect_in_use('stages'): pass")
    assert done.returncode == 1
    assert "ServiceError: Prefect's embedded server ended while starting" in done.stderr
    assert "file is not a database" in done.stderr


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 30, b"short"], ids=["empty", "bytes", "short"])
def test_a_damaged_password_is_replaced(home, content):
    file = home / "services" / "password"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert len(password(home)) == 43
    assert password(home) == file.read_text().strip()


def test_what_carries_the_mark_of_this_home_ends_with_down_and_nothing_else(home):
    other = sleeper(env={**os.environ, HOME_MARK: str(home / "another")})
    worker = sleeper(env={**os.environ, HOME_MARK: str(home)})  # by its command line none of the three, yet ours
    assert [service.pid for service in services.status()] == [None] * 3
    assert services.down() == []
    assert (other.poll(), worker.wait(timeout=PATIENCE_S)) == (None, -signal.SIGTERM)
    other.kill()
    other.wait()


def test_another_servers_login_stands_and_ours_is_not_told_to_it(home, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "theirs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    home_module.configure_environment()
    assert os.environ["PREFECT_API_AUTH_STRING"] == "theirs"
    assert "MLFLOW_TRACKING_PASSWORD" not in os.environ


def test_a_waiting_run_of_another_server_is_sent_without_our_password(home, monkeypatch, serve):
    """The local server may have another port by now, and any program of the machine the old one."""
    told = []

    async def stranger(scope, receive, send):
        told.append(dict(scope["headers"]).get(b"authorization"))
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"nothing is known here"})

    home_module.configure_environment()
    ours = mlflow_login(password(home))
    for name, value in ours.items():
        monkeypatch.setenv(name, value)  # as while the local server runs
    RunRecord("study", "seed 0", {}, {}, serve(lambda address: stranger)).save(home)
    with pytest.raises(ServiceError, match="still fails for 1 of 1"):
        sync_pending(home)
    assert len(told) > 1  # the sign of life, and what MLflow's client asked
    assert set(told) == {None}
    assert {name: os.environ[name] for name in ours} == ours


def test_a_server_that_is_reached_through_a_proxy_alone_is_not_taken_for_dead(monkeypatch):
    looked, exits, connect = threading.Semaphore(0), [], socket.create_connection

    def counted(*args, **options):
        looked.release()
        return connect(*args, **options)

    monkeypatch.setattr(prefect_api.socket, "create_connection", counted)
    monkeypatch.setattr(prefect_api, "WATCH_SECONDS", 0.001)
    monkeypatch.setattr(prefect_api.os, "_exit", exits.append)
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_ports(1)[0]}/api")
    with prefect_api.end_without_server("Run again."):
        for _ in range(2 * prefect_api.REFUSALS_OF_A_DEAD_SERVER):
            assert looked.acquire(timeout=PATIENCE_S)
    assert exits == []


ASKED = """
import os, signal, socket, threading
from flows import prefect_api
prefect_api.WATCH_SECONDS = 0.01
listener = socket.create_server(("127.0.0.1", 0))
os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    with prefect_api.end_without_server("Run again."):
        [watch] = [thread for thread in threading.enumerate() if thread.name == "prefect-watch"]
        listener.accept()
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            listener.close()
            watch.join(1.0)  # a hundred looks, of which three would end this process
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("saved")
"""


def test_a_run_that_is_asked_to_end_together_with_its_server_saves_first(home):
    """SIGTERM to the whole job, as systemd and Slurm send it; a second one is heard in silence."""
    done = program(ASKED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")


def test_a_run_may_be_watched_from_a_thread_of_a_users_program(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_ports(1)[0]}/api")

    def run():
        with prefect_api.end_without_server("Run again."):
            return "ran"

    with ThreadPoolExecutor() as pool:
        assert pool.submit(run).result() == "ran"


def test_a_process_that_ignores_sigterm_is_killed():
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # it ignores SIGTERM from here on
        terminate([psutil.Process(process.pid)], 0.3)
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
