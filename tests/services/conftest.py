"""Shared by the tests with servers: an empty MLflow database, a real server over it, a stage's output, a browser."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rmcore.tracking import METRICS_FILE, JsonlTracker
from tasks import home as home_module
from tasks.mlflow_client import connect

CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=30000",
]


@pytest.fixture
def browse(tmp_path):
    """Gives a page's HTML once it has loaded in a window of that size; skips without a browser."""
    browser = shutil.which("chromium")
    if browser is None:
        assert os.environ.get("CI") != "true", "CI installs Chromium"
        pytest.skip("Chromium is not installed")

    def load(address, window):
        place = [f"--window-size={window}", f"--user-data-dir={tmp_path / 'profile'}"]
        command = [browser, *CHROMIUM_FLAGS, *place, "--dump-dom", address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout

    return load


@pytest.fixture(scope="module")
def migrated_database(tmp_path_factory):
    """A database with MLflow's tables, made once: the migrations take 5 s."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    connect(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def home(tmp_path, monkeypatch, migrated_database):
    """An own RM_OPT_HOME with an empty MLflow database."""
    for name in [*home_module.QUIET_ENVIRONMENT, "RM_OPT_HOME", "PREFECT_HOME", "MLFLOW_TRACKING_URI"]:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what configure_environment sets
        monkeypatch.delenv(name)
    directory = tmp_path / "home"
    monkeypatch.setenv("RM_OPT_HOME", str(directory))
    (directory / "mlflow").mkdir(parents=True)
    (directory / "mlflow" / "mlflow.db").write_bytes(migrated_database.read_bytes())
    home_module.configure_environment()
    return directory


class Server:
    """A real MLflow server over the home's database, on a port of its own."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.home = home
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        database, artifacts = self.home / "mlflow" / "mlflow.db", self.home / "mlflow" / "artifacts"
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{database}", "--no-serve-artifacts"]
        command += ["--default-artifact-root", artifacts.as_uri()]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.home / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=environment, cwd=self.home
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                return connect(self.url)
            except OSError:
                time.sleep(0.2)
        raise AssertionError((self.home / "server.log").read_text())

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def server(home, monkeypatch):
    running = Server(home)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", running.url)
    yield running
    running.kill()


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
        writer.metrics(step, {"train/loss": 1.0 / (step + 1), "train/lr": 1e-3, "eval/loss": float("nan")})
    writer.close()
    summary = {"eval/pairwise_accuracy": {"value": 0.7, "ci_low": 0.6, "ci_high": 0.8}, "calib/ece": None}
    (folder / "summary.json").write_text(json.dumps({"metrics": summary, "num_pairs": 9}))
    return folder
