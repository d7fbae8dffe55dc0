"""Shared by the tests with servers: an empty MLflow database, a real server, a stage's output, a browser, and the local
services as `rm-opt up` starts them. The tests of one folder run one after the other in one process, so that each server
is started once for all of them."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import httpx
import psutil
import pytest
import websockets.sync.client

from forwarder import Forwarder
from machine import PATIENCE_S, free_ports, wait_for
from owner_login import Patient
from pixels.sitecustomize import FOLDER as PIXELS
from rmcore.core.child_process import StageServer
from rmcore.core.processes import marked, terminate
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.core.web import keep_direct
from tasks import home as home_module
from tasks.mlflow_client import connect
from tasks.passwords import basic_authorization, password
from used_homes import begin, clean_environment, take_as_home
from warm_commands import WarmCommands

CHROMIUM_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--remote-debugging-port=0",
]  # fmt: skip
PASSWORD_FIELD = "document.querySelector('input[type=password]')"


class Browser:
    """A page of a real browser, told what to do by its DevTools protocol."""

    def __init__(self, program, profile):
        command = [program, *CHROMIUM_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        ready = next(line for line in self.process.stderr if "DevTools listening on" in line)
        targets = httpx.get(f"http://{ready.split('/')[2]}/json/list", timeout=PATIENCE_S).json()
        page = next(target for target in targets if target["type"] == "page")
        self.socket = websockets.sync.client.connect(page["webSocketDebuggerUrl"], max_size=None)
        self.num_sent = 0

    def __call__(self, address, window, expected):
        """The HTML at an address in a window of that size, once it holds the expected texts; at the limit as it is."""
        width, height = map(int, window.split(","))
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.tell("Page.navigate", url=address)
        texts = [text.lower() for text in expected]
        return self.wait("document.documentElement.outerHTML", lambda page: all(text in page.lower() for text in texts))

    def paste_password(self, address, password):
        """Do what the UI asks of whoever opens it for the first time."""
        self.tell("Page.navigate", url=address)
        self.wait(f"{PASSWORD_FIELD} != null", bool)
        self.run(f"{PASSWORD_FIELD}.focus()")
        self.tell("Input.insertText", text=password)
        for kind in ("rawKeyDown", "char", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13)
        self.wait(f"{PASSWORD_FIELD} == null", bool)

    def wait(self, expression, holds):
        deadline = time.monotonic() + PATIENCE_S
        while not holds(value := self.run(expression)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return value

    def run(self, expression):
        return self.tell("Runtime.evaluate", expression=expression)["result"].get("value", "")

    def tell(self, method, **parameters):
        self.num_sent += 1
        self.socket.send(json.dumps({"id": self.num_sent, "method": method, "params": parameters}))
        while (answer := json.loads(self.socket.recv(timeout=PATIENCE_S))).get("id") != self.num_sent:
            pass
        return answer["result"]

    def close(self):
        self.socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()


@pytest.fixture
def browse(tmp_path):
    """A browser; skips without one."""
    program = shutil.which("chromium")
    if program is None:
        assert os.environ.get("CI") != "true", "CI installs Chromium"
        pytest.skip("Chromium is not installed")
    browser = Browser(program, tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def migrated_database(databases):
    """A database with MLflow's tables."""
    return databases / "mlflow" / "mlflow.db"


@pytest.fixture
def home(tmp_path, monkeypatch, migrated_database):
    """An own RM_OPT_HOME with an empty MLflow database."""
    directory = take_as_home(tmp_path / "home", monkeypatch)
    (directory / "mlflow").mkdir(parents=True)
    (directory / "mlflow" / "mlflow.db").write_bytes(migrated_database.read_bytes())
    home_module.configure_environment()
    return directory


class Server:
    """A real MLflow server in a folder of its own, at an address of its own where it is `away` and `back` at once."""

    def __init__(self, folder: Path, database: Path) -> None:
        port, self.port = free_ports(2)
        log = folder / "server.log"
        shutil.copy(database, folder / "mlflow.db")
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--no-serve-artifacts"]
        command += ["--default-artifact-root", (folder / "artifacts").as_uri()]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with log.open("wb") as told:
            self.process = subprocess.Popen(
                command, stdout=told, stderr=told, start_new_session=True, env=environment, cwd=folder
            )

        def answers():
            with contextlib.suppress(OSError):
                return connect(f"http://127.0.0.1:{port}")

        wait_for(answers, log.read_text)
        self.connect = partial(socket.create_connection, ("127.0.0.1", port))
        self.back()
        self.url = self.front.address

    def back(self) -> None:
        self.front = Forwarder(self.connect, self.port)

    def away(self) -> None:
        self.front.close()

    def kill(self) -> None:
        self.away()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def clear(self) -> None:
        """Put away what a test left: its experiments under another name, and its registered models."""
        client = connect(self.url)
        for found in client.search_experiments(filter_string="name LIKE 'rm/%'"):
            client.rename_experiment(found.experiment_id, f"left-{found.experiment_id}")
        for model in client.search_registered_models():
            client.delete_registered_model(model.name)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory, migrated_database):
    running = Server(tmp_path_factory.mktemp("mlflow-server"), migrated_database)
    yield running
    running.kill()


@pytest.fixture
def server(home, mlflow_server, monkeypatch):
    """The server, without any run or model, as where this test's runs are tracked; it may go away and come back."""
    if not mlflow_server.front.is_open:
        mlflow_server.back()
    mlflow_server.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
    return mlflow_server


@pytest.fixture
def artifact(tmp_path):
    """A stage's output: three steps, a summary, a figure and a table."""
    folder = tmp_path / "artifact"
    (folder / "figures").mkdir(parents=True)
    (folder / "tables").mkdir()
    (folder / "figures" / "curve.png").write_bytes(b"\x89PNG")
    (folder / "tables" / "mistakes.csv").write_text("pair_id\na\n")
    writer = JsonlTracker(folder / METRICS_FILE)
    for step in range(3):
        curves = {"train/loss": 1.0 / (step + 1), "train/lr": 1e-3, "eval/loss": float("nan"), "eval/tie_rate": 0.1}
        writer.metrics(step, curves)
    writer.close()
    accuracy = {"value": 0.7, "ci_low": 0.6, "ci_high": 0.8}
    summary = {"eval/test_pairwise_accuracy": accuracy, "calib/ece": None, "eval/test_brier": 0.2}
    (folder / "summary.json").write_text(json.dumps({"metrics": summary, "num_pairs": 9}))
    return folder


class Services:
    """Both servers and the worker, started by the command line in a home of their own.

    Stages of all runs and commands are forked from one process that has imported what they need, which takes five
    seconds of a core.
    """

    def __init__(self, home):
        keep_direct()  # as each command does first: the stage server serves runs with the same variables only
        inherited = clean_environment() | {"PYTHONUNBUFFERED": "1"}  # which the worker's runs have
        self.home = home
        self.stages = StageServer(
            {**home_module.QUIET_ENVIRONMENT, **inherited, **home_module.SAFE_ENVIRONMENT}
            | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONIOENCODING": ":backslashreplace"}
        )
        self.environment = inherited | self.stages.variable
        self.environment |= {"RM_OPT_HOME": str(home), "RM_OPT_DEVICE_SLOTS": "2"}
        prefect_port, mlflow_port = free_ports(2)
        self.ui, self.mlflow = f"http://127.0.0.1:{prefect_port}", f"http://127.0.0.1:{mlflow_port}"
        self.api = f"{self.ui}/api"
        ports = ("--prefect-port", prefect_port, "--mlflow-port", mlflow_port)
        self.printed = self.rm_opt("up", *ports)
        self.warm = WarmCommands()
        self.password = password(home)
        self.http = httpx.Client(timeout=PATIENCE_S, headers=basic_authorization(self.password), transport=Patient())
        """Speaks to all servers as their owner."""
        self.tracking = f"http://any:{self.password}@127.0.0.1:{mlflow_port}"
        """MLflow's address for a client of its owner."""

    def stage_processes(self):
        """The stages that are computed now."""
        return psutil.Process(self.stages.process.pid).children()

    def close(self):
        """End what is not a service; `rm-opt down` ends those."""
        self.warm.close()
        self.stages.__exit__()

    def rm_opt(self, *arguments):
        command = [sys.executable, "-c", "from flows.cli import main; main()", *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def flow_command(self, *arguments):
        done = self.warm.run(arguments, self.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deployment(self, flow="pipeline"):
        """The one deployment of a flow."""
        wanted = {"flows": {"name": {"any_": [flow]}}}
        [found] = self.http.post(f"{self.api}/deployments/filter", json=wanted).raise_for_status().json()
        return found

    def trigger(self, parameters, flow="pipeline", **more):
        place = f"{self.api}/deployments/{self.deployment(flow)['id']}/create_flow_run"
        return self.http.post(place, json={"parameters": parameters} | more)

    def flow_runs(self, **conditions):
        return self.http.post(f"{self.api}/flow_runs/filter", json={"flow_runs": conditions}).raise_for_status().json()

    def wait(self, run_id, until=lambda: False):
        """The flow run once it has ended, or once `until()` is true: it is asked at each look."""

        def ended():
            reached = until()  # first: the run that is given was asked for after that
            run = self.http.get(f"{self.api}/flow_runs/{run_id}").raise_for_status().json()
            return run if reached or run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

        return self.wait_for(ended)

    def wait_for(self, condition):
        """What `condition()` gives once it is true: it asks the servers, at most once a second."""
        return wait_for(condition, pause=1.0)

    def mlflow_runs(self, study):
        """Runs of a study in MLflow; none where it has no experiment."""
        place = f"{self.mlflow}/api/2.0/mlflow"
        wanted = {"max_results": 10, "filter": f"name = 'rm/{study}'"}
        found = self.http.post(f"{place}/experiments/search", json=wanted).raise_for_status().json()
        search = {"experiment_ids": [one["experiment_id"] for one in found.get("experiments", [])], "max_results": 10}
        if not search["experiment_ids"]:
            return []
        return self.http.post(f"{place}/runs/search", json=search).raise_for_status().json().get("runs", [])

    def logs(self, run_id):
        """The lines of a flow run's log, its tasks' among them, in their order."""
        wanted = {"logs": {"flow_run_id": {"any_": [run_id]}}, "sort": "TIMESTAMP_ASC"}
        answer = self.http.post(f"{self.api}/logs/filter", json=wanted).raise_for_status()
        return [line["message"] for line in answer.json()]

    def artifacts(self, run_id):
        """What a flow run left to read on its page."""
        return [artifact["data"] for artifact in self._artifacts(run_id) if artifact["type"] == "markdown"]

    def cards(self, run_id):
        """What the cards on a flow run's page hold, by their titles."""
        return {artifact["key"]: artifact["data"] for artifact in self._artifacts(run_id)}

    def _artifacts(self, run_id):
        filtered = {"artifacts": {"flow_run_id": {"any_": [run_id]}}}
        return self.http.post(f"{self.api}/artifacts/filter", json=filtered).raise_for_status().json()

    def edges(self, run_id):
        """The graph on a flow run's page: what comes right before each node, by their names."""
        graph = self.http.get(f"{self.api}/flow_runs/{run_id}/graph-v2").raise_for_status().json()
        names = {key: node["label"] for key, node in graph["nodes"]}
        return {node["label"]: {names[parent["id"]] for parent in node["parents"]} for _, node in graph["nodes"]}

    def report(self, run_id):
        """The one report that a flow run's page links to, as MLflow hands it out to its page of the run."""
        place = rf"{re.escape(self.mlflow)}/#/experiments/\d+/runs/(\w+)/artifacts/([^?)\s]+)"
        [(run, path)] = re.findall(place, " ".join(self.artifacts(run_id)))
        asked = {"run_uuid": run, "path": unquote(path)}
        return self.http.get(f"{self.mlflow}/get-artifact", params=asked).raise_for_status().text


@pytest.fixture(scope="package")
def services(tmp_path_factory, databases):
    """The local services, up as long as a process runs tests of these folders: idle servers and a worker cost, too."""
    home = begin(tmp_path_factory.mktemp("services") / "home", databases)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("PYTHONPATH", PIXELS)
            started = Services(home)
        yield started
        assert "worker" in started.rm_opt("down")
        assert started.flow_command("info").count("not running") == 3
        started.close()
    finally:
        terminate(marked("RM_OPT_HOME", str(home)))  # what an `up` that failed may have left
